"""Trajectories of one optimizer step, for the whole-model benchmarks: whole groups of real rollouts, up to a size.

Rollouts come from a folder with `rollouts.py` and its `.npz` files; without one, from the bundled tau-bench episodes,
a word a token.
"""

import gzip
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harts_hf.execution import Trajectory

SETS = {  # name: file, sampling form, remark
    "swe_treestep/tree_step": (
        "swe_treestep_semisynthetic",
        "tree_step",
        "text of real episodes, their branching is made up",
    ),
    "swe_bench/step_wise": ("swe_bench_gemini3", "step_wise", ""),
    "swe_bench/step_wise_without_thoughts": ("swe_bench_gemini3", "step_wise_without_thoughts", ""),
    "tau_bench/tree_step": ("tau_bench_airline_gpt4o", "tree_step", ""),
    "toolbench/tree_step": ("toolbench_dfs_tree", "tree_step", ""),
}
BUNDLED = "tau_bench_bundled/tree_step"
_BUNDLED_FILE = Path(__file__).parents[1] / "examples" / "data" / "tau_bench_airline" / "rollouts.jsonl.gz"
_SYSTEM_WORDS = 400


@dataclass(frozen=True)
class RolloutStep:
    """One step's worth of a set.

    Attributes:
        name (`str`): of the set.
        remark (`str`): what to say beside a figure; empty for real rollouts as they are.
        trajectories (`list[Trajectory]`): with the sampled tokens as scored ones.
        advantages (`[N]`, fp64): standard normal; rewards of a set with one episode a task would leave nothing.
        num_groups (`int`): groups taken, all trajectories of each.
        num_left_out (`int`): trajectories of these groups above the length limit, left out for every variant alike.
    """

    name: str
    remark: str
    trajectories: list[Trajectory]
    advantages: np.ndarray
    num_groups: int
    num_left_out: int

    @property
    def sequences(self) -> list[np.ndarray]:
        """Token ids of each trajectory."""
        return [t.token_ids for t in self.trajectories]

    @property
    def num_tokens(self) -> int:
        """Expanded tokens."""
        return sum(len(t.token_ids) for t in self.trajectories)

    @property
    def num_scored(self) -> int:
        """Scored tokens, a shared one counted for each trajectory."""
        return sum(int(t.scored.sum()) for t in self.trajectories)


def set_names(folder: Path | None) -> list[str]:
    """Names that `load_step` takes with this folder."""
    return list(SETS) if folder is not None else [BUNDLED]


def load_step(
    name: str,
    folder: Path | None,
    *,
    num_tokens: int,
    max_length: int,
    vocab_size: int,
    thin: bool = False,
    seed: int = 0,
) -> RolloutStep:
    """One step of a set: groups in an order drawn with the seed, until `num_tokens` expanded tokens are reached.

    Args:
        name: one of `set_names(folder)`.
        folder: with `rollouts.py` and the `.npz` files, or None for the bundled rollouts.
        num_tokens: least expanded tokens; fewer if the set has no more. The last group makes it more.
        max_length: most tokens of a trajectory.
        vocab_size: ids are taken modulo this, which keeps shared prefixes shared.
        thin: for small models: keep every so many tokens, the same number for all trajectories, that those of the
            first group become `max_length` long at most; cut longer ones. Trees keep their shape.
        seed: of the order of groups and of the advantages.

    Raises:
        ValueError: no trajectory of at most `max_length` tokens with a scored token was found.
    """
    if name == BUNDLED:
        groups, samples_of, remark = *_bundled_groups(), "a word a token"
    else:
        groups, samples_of, remark = _npz_groups(name, folder)
    rng = np.random.default_rng(seed)
    trajectories, num_groups, left_out, total, stride = [], 0, 0, 0, None
    for group in rng.permutation(groups).tolist():
        if total >= num_tokens:
            break
        num_groups += 1
        samples = list(samples_of(group))
        if thin:
            stride = stride or -(-max(len(tokens) for tokens, _ in samples) // max_length)
            samples = [(tokens[::stride][:max_length], mask[::stride][:max_length]) for tokens, mask in samples]
        for tokens, mask in samples:
            if len(tokens) > max_length:
                left_out += 1
                continue
            scored = np.array(mask, dtype=bool)
            scored[0] = False
            if scored.any():
                token_ids = np.asarray(tokens, dtype=np.int64) % vocab_size
                trajectories.append(Trajectory(token_ids, scored))
                total += len(token_ids)
    if not trajectories:
        raise ValueError(f"{name}: no trajectory of at most {max_length} tokens has a scored token")
    advantages = rng.standard_normal(len(trajectories))
    return RolloutStep(name, remark, trajectories, advantages, num_groups, left_out)


Samples = Iterator[tuple[np.ndarray, np.ndarray]]  # token ids and loss mask of each trajectory of a group


def _npz_groups(name: str, folder: Path) -> tuple[np.ndarray, Callable[[int], Samples], str]:
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    import rollouts

    file, form, remark = SETS[name]
    data = rollouts.load(folder / f"{file}.npz")

    def samples_of(group: int) -> Samples:
        return ((s.tokens, s.loss_mask) for s in getattr(rollouts, form)(data, groups={group}))

    return np.unique(data["group"]), samples_of, remark


def _bundled_groups() -> tuple[np.ndarray, Callable[[int], Samples]]:
    with gzip.open(_BUNDLED_FILE, "rt", encoding="utf-8") as lines:
        chats = [json.loads(line) for line in lines]
    names = sorted({chat["group"] for chat in chats})
    numbers: dict[str, int] = {}

    def samples_of(group: int) -> Samples:
        return (_chat_words(chat["messages"], numbers) for chat in chats if chat["group"] == names[group])

    return np.arange(len(names)), samples_of


def _chat_words(messages: list[dict], numbers: dict[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """A number for each word of a chat, given in order of appearance, and which words the model sampled.

    Of the system prompt only the last words are kept: it would be most of a short trajectory.
    """
    tokens, mask = [], []
    for message in messages:
        words = message["content"].split()
        if message["role"] == "system":
            words = words[-_SYSTEM_WORDS:]
        words.append(f"end of {message['role']}")
        tokens += [numbers.setdefault(word, len(numbers)) for word in words]
        mask += [message["role"] == "assistant"] * len(words)
    return np.array(tokens), np.array(mask)
