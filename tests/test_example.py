"""The example: its tokenizer, its trajectories, its picture, and a small run from end to end."""

import copy
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from accelerate.commands.config.config_args import load_config_from_file

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.insert(0, str(EXAMPLES))

from chat_trajectories import load_rollouts, sampled_turns, trajectories_from_chats  # noqa: E402
from small_model import save_small_checkpoint, train_tokenizer  # noqa: E402

from harts_hf import PrefixTree  # noqa: E402


@pytest.fixture(scope="module")
def rollouts():
    return load_rollouts(None)


@pytest.fixture(scope="module")
def tokenizer(rollouts):
    return train_tokenizer(message["content"] for chat in rollouts["messages"] for message in chat)


def assistant_turns(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] + "<|im_end|>" for message in messages if message["role"] == "assistant"]


def test_bundled_rollouts(rollouts):
    assert len(rollouts) == 64
    rewards = {}
    for group, reward in zip(rollouts["group"], rollouts["reward"], strict=True):
        rewards.setdefault(group, []).append(reward)
    assert len(rewards) == 16
    assert all(len(trials) == 4 and len(set(trials)) == 2 for trials in rewards.values())


def test_tool_schemas_are_cut_on_request(rollouts):
    full = load_rollouts(None, keep_tool_schemas=True)
    for cut, kept in zip(rollouts["messages"][:2], full["messages"][:2], strict=True):
        assert "<tools>\n</tools>" in cut[0]["content"] and "book_reservation" not in cut[0]["content"]
        assert '{"name": "book_reservation"' in kept[0]["content"]
        assert cut[1:] == kept[1:]


def test_tokenizer_round_trip(rollouts, tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    text = rollouts["messages"][3][2]["content"] + " \u00e9\u4e2d"  # bytes that the training text does not hold
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.pad_token_id != loaded.eos_token_id
    messages = [{"role": "user", "content": "a"}]
    prompt = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_trained_tokens_are_the_assistant_turns(rollouts, tokenizer):
    some = rollouts.select(range(0, 64, 7))
    trajectories = trajectories_from_chats(some, tokenizer, max_length=100_000)
    for rollout, trajectory in zip(some, trajectories, strict=True):
        ids, mask = trajectory["input_ids"], trajectory["completion_mask"]
        assert len(ids) == len(mask) and mask[0] == 0 and mask[-1] == 1
        decoded = [tokenizer.decode(ids[start:end]) for start, end in sampled_turns(mask)]
        assert decoded == assistant_turns(rollout["messages"])
        assert trajectory["reward"] == rollout["reward"] and trajectory["group"] == rollout["group"]


def test_a_cut_trajectory_is_the_start_of_the_whole(rollouts, tokenizer):
    some = rollouts.select(range(4))
    whole = trajectories_from_chats(some, tokenizer, max_length=100_000)
    cut = trajectories_from_chats(some, tokenizer, max_length=1700)
    for a, b in zip(cut, whole, strict=True):
        length = len(a["input_ids"])
        assert length <= 1700
        assert a["input_ids"] == b["input_ids"][:length]
        assert a["completion_mask"] == b["completion_mask"][:length]
        assert sum(b["completion_mask"][length:1700]) == 0  # nothing trained was lost before the cut
    with pytest.raises(ValueError, match="raise --max-length"):
        trajectories_from_chats(some, tokenizer, max_length=100)


def test_step_wise_samples_nest(rollouts, tokenizer):
    some = rollouts.select([20])
    whole = trajectories_from_chats(some, tokenizer, max_length=100_000)[0]
    steps = trajectories_from_chats(some, tokenizer, max_length=100_000, step_wise=True)
    turns = assistant_turns(some[0]["messages"])
    assert len(steps) == len(turns) > 1
    masks = np.zeros(len(whole["input_ids"]), dtype=int)
    for step, turn in zip(steps, turns, strict=True):
        length = len(step["input_ids"])
        assert step["input_ids"] == whole["input_ids"][:length]
        ((start, end),) = sampled_turns(step["completion_mask"])
        assert end == length and tokenizer.decode(step["input_ids"][start:end]) == turn
        masks[:length] += step["completion_mask"]
    assert masks.tolist() == whole["completion_mask"]  # each sampled token is trained once
    assert PrefixTree.from_sequences(steps["input_ids"]).num_rows == len(whole["input_ids"])


def test_sampled_turns():
    assert sampled_turns([0, 1, 1, 0, 1]) == [(1, 3), (4, 5)]
    assert sampled_turns([0, 0]) == []


def test_the_template_of_a_foreign_tokenizer_must_mark_turns(rollouts, tokenizer):
    foreign = copy.deepcopy(tokenizer)
    foreign.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    with pytest.raises(ValueError, match="chat template"):
        trajectories_from_chats(rollouts.select([0]), foreign, max_length=2048)


def test_small_checkpoint_loads(rollouts, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    save_small_checkpoint(tmp_path, (message["content"] for message in rollouts[0]["messages"]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config.model_type == "bailing_hybrid"
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert model.config.vocab_size == len(AutoTokenizer.from_pretrained(tmp_path))


def test_picture(tmp_path):
    from tree_picture import draw_tree

    path = tmp_path / "folder" / "tree.png"
    draw_tree(
        path,
        input_ids=[[1, 2, 3, 4], [1, 2, 3], [1, 2, 5, 6, 7], [1, 2, 3, 4]],  # a prefix of another, and a duplicate
        completion_masks=[[0, 0, 1, 1], [0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1]],
        scores=[0.0, 1.0, 1.0, 0.0],
        score_name="reward",
        labels=["a", "b", "c", "d"],
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_small_run_agrees_with_the_stock_trainer(tmp_path):
    """One step of the command of the README, on fewer and shorter trajectories."""
    output = subprocess.run(
        [sys.executable, "-m", "accelerate.commands.launch", "--num_processes=1", str(EXAMPLES / "train_tree_grpo.py")]
        + ["--output-dir", str(tmp_path), "--max-steps", "1", "--gradient-accumulation-steps", "4"]
        + ["--max-length", "1536"],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert output.returncode == 0, output.stderr
    step, *losses_and_norms = re.search(r"^1 +\S+ +\S+ +\S+ +\S+ +\S+$", output.stdout, re.MULTILINE)[0].split()
    loss, stock_loss, norm, stock_norm, _ = map(float, losses_and_norms)
    assert loss == pytest.approx(stock_loss, abs=1e-5)
    # fp32 rounding: the gradients of a tree and of single trajectories are summed in different orders
    assert norm > 0 and norm == pytest.approx(stock_norm, rel=1e-4)
    assert (tmp_path / "rollout_tree.png").exists()
    assert (tmp_path / "model.safetensors").exists()


def test_launch_configurations():
    """Accelerate takes each file, and understands it as its name says."""
    types = {"single": "NO", "ddp": "MULTI_GPU", "fsdp2": "FSDP", "fsdp2_ep": "MULTI_GPU"}
    files = sorted((EXAMPLES / "accelerate").glob("*.yaml"))
    assert {file.stem for file in files} == set(types)
    for file in files:
        config = load_config_from_file(str(file))
        assert config.distributed_type == types[file.stem]
        assert (config.fsdp_config.get("fsdp_version") == 2) == (file.stem == "fsdp2")
