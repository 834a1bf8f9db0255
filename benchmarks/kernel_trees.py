"""Trees on which the kernels' benchmarks run: microbatches of rollouts, and synthetic worst cases."""

import sys
from pathlib import Path

import numpy as np

from harts_hf.tree import PrefixTree

SEED = 0
SETS = (
    ("swe_treestep_semisynthetic", "tree_step"),
    ("swe_bench_gemini3", "step_wise_without_thoughts"),
    ("tau_bench_airline_gpt4o", "tree_step"),
    ("toolbench_dfs_tree", "tree_step"),
    ("tot_game24_bfs_tree", "tree_step"),
)
BRANCHES = (0, 8, 16, 32, 64)  # boundaries on the chain of the trees that measure the cost of a round
BRANCH_TOKENS = 64


def rollout_trees(folder: Path, max_rows: int):
    """Of each set, the run of neighbours in sorted order that has the most rows within `max_rows`."""
    sys.path.insert(0, str(folder))
    import rollouts

    for name, form in SETS:
        samples = getattr(rollouts, form)(rollouts.load(folder / f"{name}.npz"))
        sequences = [s.tokens for s in samples if len(s.tokens) <= max_rows]
        yield f"{name}/{form}", [sequences[i] for i in fullest_run(sequences, max_rows)]


def fullest_run(sequences, max_rows: int) -> np.ndarray:
    """Indices of the first such run; none of the sequences is longer than `max_rows`."""
    tree = PrefixTree.from_sequences(sequences)
    lengths = np.array([len(sequences[i]) for i in tree.sorted_order])
    new_rows = lengths - tree.sorted_lcp  # of each behind its neighbour
    best, best_rows, begin, rows = (0, 0), 0, 0, 0
    for end, added in enumerate(new_rows):
        rows += added
        while rows > max_rows:  # drop the first; what it shared with the next stays
            rows -= lengths[begin] - tree.sorted_lcp[begin + 1]
            begin += 1
        if rows > best_rows:
            best, best_rows = (begin, end + 1), rows
    return tree.sorted_order[slice(*best)]


def synthetic_trees(max_rows: int):
    """A long chain with 60 branches, a wide fork, and chains of equal size with more and more rounds."""
    rng = np.random.default_rng(SEED)
    chain = rng.integers(10, 1000, 3 * max_rows // 4)
    length = max_rows // 4 // 60
    places = np.linspace(200, len(chain) - 10, 60).astype(int)
    yield "chain with 60 branches", [chain, *(np.append(chain[:p], rng.integers(1000, 2000, length)) for p in places)]
    count = (max_rows - 1037) // 300
    yield "wide fork", [np.append(chain[:1037], rng.integers(1000, 2000, 300)) for _ in range(count)]
    chain = rng.integers(10, 1000, max_rows // 2)
    roots = rng.integers(2000, 3000, (max(BRANCHES), BRANCH_TOKENS))
    for count in BRANCHES:
        # The branches that do not fork from the chain are trees of their own: the same tokens, no boundary.
        places = (np.arange(1, count + 1) * (len(chain) // (max(BRANCHES) + 1)) // 64) * 64
        forks = [np.append(chain[:p], roots[i]) for i, p in enumerate(places)]
        yield f"{count} boundaries on a chain", [chain, *forks, *roots[count:]]
