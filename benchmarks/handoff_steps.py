"""Steps whose trajectories pass a given number of hand-offs, or of forks.

A chain has one prefix and two trajectories that continue it. The same two trajectories are planned with the prefix
computed by 0 to `depth` producers, each window inside the one before, or in one microbatch in which other branches
leave the prefix at the same places.
"""

from dataclasses import dataclass

import numpy as np

from harts_hf.planning.plan import Microbatch, StepPlan, Window

CHUNK_SIZE = 64
FIRST_ID = 2  # ids below are padding and EOS
BRANCH_TOKENS = CHUNK_SIZE + 7
LAYOUTS = ("windows", "forks")


@dataclass(frozen=True, eq=False)
class Chain:
    """A prefix, two trajectories behind it, and where it may be handed over.

    Attributes:
        sequences (two of `[length]`, int64): the trajectories, of equal length, in lexicographic order. They part at
            the last cut.
        branches (tuple of `[length]`, int64): trajectories that leave the prefix at each cut but the last.
        cuts (`tuple[int, ...]`): lengths of the prefix, increasing, none a multiple of the chunk size.
    """

    sequences: tuple[np.ndarray, np.ndarray]
    branches: tuple[np.ndarray, ...]
    cuts: tuple[int, ...]


def make_chains(count: int, depth: int, gap: int, own_tokens: int, vocab_size: int, seed: int) -> list[Chain]:
    """Chains of random tokens.

    Args:
        count: chains.
        depth: cuts of each, about `gap` tokens apart, at any place in a chunk but its start.
        gap: tokens, at least 64.
        own_tokens: tokens of each trajectory behind the last cut.
        vocab_size: of the model.
        seed: of tokens and cuts.
    """
    rng = np.random.default_rng(seed)
    chains = []
    for _ in range(count):
        cuts = []
        for k in range(1, depth + 1):
            cut = k * gap
            cuts.append(cut - cut % CHUNK_SIZE + int(rng.integers(1, CHUNK_SIZE)))
        prefix = rng.integers(FIRST_ID, vocab_size, cuts[-1])
        first = np.sort(rng.choice(np.arange(FIRST_ID, vocab_size), 2, replace=False))
        sequences = tuple(
            np.concatenate([prefix, [token], rng.integers(FIRST_ID, vocab_size, own_tokens - 1)]) for token in first
        )
        branches = []
        for cut in cuts[:-1]:
            others = np.setdiff1d(np.arange(FIRST_ID, vocab_size), prefix[cut : cut + 1])
            branch = [rng.choice(others, 1), rng.integers(FIRST_ID, vocab_size, BRANCH_TOKENS - 1)]
            branches.append(np.concatenate([prefix[:cut], *branch]))
        chains.append(Chain(sequences, tuple(branches), tuple(cuts)))
    return chains


def plan_chain(chain: Chain, layout: str, depth: int) -> tuple[list[np.ndarray], StepPlan]:
    """Sequences and a plan for one replica. The chain's two trajectories are the first two of the sequences.

    Args:
        chain: what is planned.
        layout: "windows": `depth` producers hand the prefix over, and the two trajectories are the last one's only
            consumer. "forks": one microbatch in which the two trajectories pass `depth` forks.
        depth: hand-offs or forks, the last ones of the chain's cuts; 0 runs each trajectory alone.
    """
    sequences = list(chain.sequences)
    rows = len(sequences[0])
    if depth == 0:
        slots = tuple((Microbatch((i,), rows),) for i in range(2))
        return sequences, StepPlan(slots, 2 * rows)
    cuts = chain.cuts[-depth:]
    own = rows - cuts[-1]
    if layout == "windows":
        windows = tuple(Window(0, cut, 0, (0,), k - 1 if k else None) for k, cut in enumerate(cuts))
        return sequences, StepPlan(((Microbatch((0, 1), 2 * own, depth - 1),),), 2 * rows, windows)
    branches = chain.branches[len(chain.branches) - (depth - 1) :]
    sequences += branches
    order = sorted(range(len(sequences)), key=lambda i: sequences[i].tolist())
    microbatch = Microbatch(tuple(order), rows + own + BRANCH_TOKENS * len(branches))
    return sequences, StepPlan(((microbatch,),), sum(map(len, sequences)))
