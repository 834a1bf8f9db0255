"""Chats with rewards -> the trajectories that the trainers take.

A rollout is a chat whose `assistant` turns were sampled by the model. As a trajectory it is one list of token ids with
a mask of the sampled tokens, the rollout's reward and its group.
"""

import re
from pathlib import Path

from datasets import Dataset, load_dataset, load_from_disk
from transformers import PreTrainedTokenizerBase
from trl import get_training_chat_template

BUNDLED = Path(__file__).parent / "data" / "tau_bench_airline" / "rollouts.jsonl.gz"


def load_rollouts(source: str | None, split: str = "train", keep_tool_schemas: bool = False) -> Dataset:
    """Load chats or finished trajectories.

    Args:
        source (`str`, *optional*): a `.jsonl`, `.json`, `.jsonl.gz` or `.parquet` file, a folder of
            `Dataset.save_to_disk`, or a dataset id of the hub; `None` takes the bundled tau-bench rollouts.
        split (`str`): split of a hub dataset.
        keep_tool_schemas (`bool`): keep the tools' schemas in the system prompt of the bundled rollouts.

    Returns:
        `Dataset`: as stored; the bundled rollouts have the columns `group`, `trial`, `reward` and `messages`.
    """
    if source is None:
        rollouts = load_dataset("json", data_files=str(BUNDLED), split="train")
        return rollouts if keep_tool_schemas else rollouts.map(_without_tool_schemas)
    path = Path(source)
    if path.is_dir():
        return load_from_disk(source)
    if path.is_file():
        return load_dataset("parquet" if path.suffix == ".parquet" else "json", data_files=source, split="train")
    return load_dataset(source, split=split)


def _without_tool_schemas(rollout: dict) -> dict:
    """Cut what stands between <tools> and </tools> in the system prompt."""
    system, *turns = rollout["messages"]
    content = re.sub(r"(?<=<tools>\n).*(?=</tools>\n)", "", system["content"], flags=re.DOTALL)
    return {"messages": [{**system, "content": content}, *turns]}


def trajectories_from_chats(
    rollouts: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int, step_wise: bool = False
) -> Dataset:
    """Tokenize chats into trajectories.

    Each chat is rendered once with the tokenizer's chat template, so that trials with equal first turns share a prefix
    of token ids. Templates that rewrite earlier turns are replaced by TRL's training version.

    Args:
        rollouts: dataset with `messages`, `reward` and `group`.
        tokenizer: with a chat template that marks the assistant's turns, or one that TRL can replace.
        max_length (`int`): tokens at which a trajectory is cut; without a sampled token before the cut it is left out.
        step_wise (`bool`): one trajectory per turn of the model, trained on that turn alone, instead of one per chat.
            Its context is all that came before, so the trajectories of a chat are prefixes of each other.

    Returns:
        `Dataset`: columns `input_ids` (list of `int`), `completion_mask` (list of `int`, 1 = sampled by the model),
        `reward` (`float`) and `group`.

    Raises:
        ValueError: the chat template does not mark the assistant's turns and TRL has no replacement, or no trajectory
            has a sampled token before `max_length`.
    """
    template = get_training_chat_template(tokenizer)
    rows = []
    for rollout in rollouts:
        encoded = tokenizer.apply_chat_template(
            rollout["messages"], chat_template=template, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, mask = encoded["input_ids"][:max_length], encoded["assistant_masks"][:max_length]
        turns = sampled_turns(mask)
        if not turns:
            continue
        shared = {"reward": float(rollout["reward"]), "group": rollout["group"]}
        if step_wise:
            for start, end in turns:
                mask_of_turn = [0] * start + [1] * (end - start)
                rows.append({"input_ids": ids[:end], "completion_mask": mask_of_turn, **shared})
        else:
            end = turns[-1][1]  # what follows the last sampled token trains nothing
            rows.append({"input_ids": ids[:end], "completion_mask": mask[:end], **shared})
    if not rows:
        raise ValueError(f"no rollout has a sampled token among its first {max_length} tokens: raise --max-length")
    return Dataset.from_list(rows)


def sampled_turns(completion_mask: list[int]) -> list[tuple[int, int]]:
    """`(start, end)` of each run of ones: the turns that the model sampled."""
    turns = []
    start = None
    for position, sampled in enumerate([*completion_mask, 0]):
        if sampled and start is None:
            start = position
        elif not sampled and start is not None:
            turns.append((start, position))
            start = None
    return turns
