"""PrefixTree against its definition: a row is a distinct prefix, found here with sets of tuples."""

import os
import time
from pathlib import Path

import numpy as np
import pytest
from forests import shapes
from small_forests import all_tiny_forests, failures_name, small_forest

from harts_hf import tree as tree_module
from harts_hf.tree import PrefixTree

FIELDS = ("token_ids", "position_ids", "parent", "subtree_end", "counts")


def check_tree(sequences):
    """Every property of the tree of `sequences`, a list of lists."""
    tree = PrefixTree.from_sequences(sequences)
    passing = {}  # prefix -> the trajectories that pass through it
    for i, sequence in enumerate(sequences):
        for n in range(1, len(sequence) + 1):
            passing.setdefault(tuple(sequence[:n]), set()).add(i)
    prefixes = sorted(passing)  # depth first, children by token
    row_of = {prefix: row for row, prefix in enumerate(prefixes)}

    assert tree.num_rows == len(prefixes)
    assert tree.num_tokens == sum(map(len, sequences))
    assert tree.num_trajectories == len(sequences)
    assert tree.compression == tree.num_tokens / tree.num_rows
    assert tree.token_ids.tolist() == [p[-1] for p in prefixes]
    assert tree.position_ids.tolist() == [len(p) - 1 for p in prefixes]
    assert tree.parent.tolist() == [row_of.get(p[:-1], -1) for p in prefixes]
    assert tree.counts.tolist() == [len(passing[p]) for p in prefixes]
    assert tree.subtree_end.tolist() == [
        row + sum(q[: len(p)] == p for q in prefixes) for row, p in enumerate(prefixes)
    ]
    assert tree.segment_starts().tolist() == [
        row for row, p in enumerate(prefixes) if len(p) == 1 or passing[p] != passing[p[:-1]]
    ]
    expected_rows = [[row_of[tuple(s[:n])] for n in range(1, len(s) + 1)] for s in sequences]
    assert [tree.rows(i).tolist() for i in range(len(sequences))] == expected_rows
    assert [rows.tolist() for rows in tree.all_rows()] == expected_rows

    order = tree.sorted_order.tolist()
    assert order == sorted(range(len(sequences)), key=lambda i: sequences[i])
    assert tree.lengths.tolist() == [len(s) for s in sequences]
    neighbours = [([], sequences[order[0]])] + [
        (sequences[a], sequences[b]) for a, b in zip(order[:-1], order[1:], strict=True)
    ]
    assert tree.sorted_lcp.tolist() == [len(os.path.commonprefix(pair)) for pair in neighbours]
    for name in FIELDS:
        assert getattr(tree, name).dtype == np.int64


@pytest.mark.parametrize("block", range(10))
def test_random_forests(block):
    for seed in range(300 * block, 300 * (block + 1)):
        sequences = small_forest(seed)
        with failures_name(seed, sequences):
            check_tree(sequences)


def test_all_tiny_forests():
    for sequences in all_tiny_forests(max_tokens=3, max_trajectories=3):
        with failures_name(None, sequences):
            check_tree(sequences)


def test_named_shapes():
    for name, sequences in shapes(np.random.default_rng(0), vocab=50):
        with failures_name(0, name):
            check_tree([s.tolist() for s in sequences])


def test_a_wrong_tree_is_noticed(monkeypatch):
    """The check itself: one common prefix that is a token short fails it."""
    right = tree_module._common_prefix
    monkeypatch.setattr(tree_module, "_common_prefix", lambda a, b: max(0, right(a, b) - 1))
    with pytest.raises(AssertionError):
        check_tree([[1, 2, 3], [1, 2, 4]])


def test_children_are_ordered_by_token_whatever_its_bytes():
    ids = [0, 1, 127, 128, 255, 256, 257, 65535, 65536, 2**24, 2**31 - 1]
    check_tree([[a, b] for a in ids[::-1] for b in ids] + [[a] for a in ids])


def test_long_common_prefixes():
    """Neighbours are compared in blocks of 4,096 tokens: forks at block edges, and none at all."""
    trunk = np.arange(10_000) % 977
    for cut in (1, 4095, 4096, 4097, 8191, 8192, 9999, 10_000):
        tree = PrefixTree.from_sequences([np.append(trunk[:cut], 5000), trunk, trunk])
        assert tree.num_rows == 10_001, cut
        assert sorted(tree.sorted_lcp.tolist()) == sorted([0, cut, 10_000]), cut


def test_order_and_type_of_the_input_do_not_matter():
    rng = np.random.default_rng(0)
    for seed in range(50):
        sequences = small_forest(seed)
        tree = PrefixTree.from_sequences(sequences)
        shuffled = rng.permutation(len(sequences))
        kinds = [list, tuple, np.uint8, np.int32, np.int64, np.uint64, ">i4"]
        given = []
        for k, i in enumerate(shuffled):
            kind = kinds[k % len(kinds)]
            given.append(kind(sequences[i]) if kind in (list, tuple) else np.array(sequences[i], dtype=kind))
        other = PrefixTree.from_sequences(given)
        with failures_name(seed, sequences, shuffled=shuffled.tolist()):
            for name in FIELDS:
                np.testing.assert_array_equal(getattr(other, name), getattr(tree, name), err_msg=name)
            for k, i in enumerate(shuffled):
                np.testing.assert_array_equal(other.rows(k), tree.rows(int(i)))


def test_a_view_with_a_stride_is_read_right_and_left_alone():
    base = np.arange(20)
    tree = PrefixTree.from_sequences([base[::3], base[::-1]])
    assert tree.token_ids[tree.rows(0)].tolist() == base[::3].tolist()
    assert tree.token_ids[tree.rows(1)].tolist() == base[::-1].tolist()
    assert base.tolist() == list(range(20))


@pytest.mark.parametrize(
    "bad, error, message",
    [
        ([], ValueError, "is empty"),
        (np.zeros(0, dtype=np.int64), ValueError, "is empty"),
        ([1.0, 2.0], TypeError, "integers, got dtype float64"),
        ([1, 2.5], TypeError, "integers, got dtype float64"),
        ([True, False], TypeError, "integers, got dtype bool"),
        (["1"], TypeError, "integers"),
        ([2**70], TypeError, "integers"),
        ([[1, 2], [3, 4]], ValueError, r"one-dimensional, got shape \(2, 2\)"),
        (7, ValueError, r"one-dimensional, got shape \(\)"),
        ([3, -1], ValueError, r"0 .. 2\*\*31 - 1, got -1 .. 3"),
        ([2**31], ValueError, r"0 .. 2\*\*31 - 1, got 2147483648"),
        (np.array([2**63], dtype=np.uint64), ValueError, r"0 .. 2\*\*31 - 1, got 9223372036854775808"),
    ],
)
def test_a_bad_trajectory_is_refused_by_name(bad, error, message):
    with pytest.raises(error, match=f"trajectory 2.*{message}"):
        PrefixTree.from_sequences([[1], [1, 2], bad, [4]])


@pytest.mark.parametrize("build", [PrefixTree.from_sequences, PrefixTree.without_sharing])
def test_no_trajectory_is_refused(build):
    with pytest.raises(ValueError, match="at least one trajectory"):
        build([])


def test_without_sharing_is_the_packed_batch():
    """Duplicates, prefixes and unsorted trajectories stay apart, in the order given."""
    sequences = [[5, 6, 7], [1, 2], [1, 2, 3], [1, 2], [4]]
    forest = PrefixTree.without_sharing(sequences)
    assert forest.num_rows == forest.num_tokens == 11
    assert forest.token_ids.tolist() == sum(sequences, [])
    assert forest.position_ids.tolist() == [p for s in sequences for p in range(len(s))]
    assert forest.parent.tolist() == [-1, 0, 1, -1, 3, -1, 5, 6, -1, 8, -1]
    assert forest.subtree_end.tolist() == [3, 3, 3, 5, 5, 8, 8, 8, 10, 10, 11]
    assert forest.counts.tolist() == [1] * 11
    assert [rows.tolist() for rows in forest.all_rows()] == [[0, 1, 2], [3, 4], [5, 6, 7], [8, 9], [10]]
    with pytest.raises(ValueError, match="trajectory 1 is empty"):
        PrefixTree.without_sharing([[1], []])


@pytest.mark.parametrize("trajectory", [-1, 2])
def test_rows_of_no_trajectory(trajectory):
    with pytest.raises(IndexError, match=f"trajectory {trajectory} is out of range"):
        PrefixTree.from_sequences([[1], [2]]).rows(trajectory)


def test_deep_and_wide_trees_need_no_recursion():
    chain = np.arange(100_000) % 1000
    deep = PrefixTree.from_sequences([chain, chain[:1], chain[:50_000]])
    assert deep.num_rows == 100_000
    assert deep.counts[[0, 1, 50_000]].tolist() == [3, 2, 1]
    wide = PrefixTree.from_sequences([[7, k] for k in range(70_000)])
    assert wide.num_rows == 70_001 and wide.subtree_end[0] == 70_001
    stairs = PrefixTree.from_sequences([np.append(chain[:n], 1000) for n in range(2000)])  # a branch on every row
    assert stairs.num_rows == 1999 + 2000
    assert stairs.rows(1999).tolist() == [*range(1999), 1999]


def test_time_is_linear_in_tokens():
    trunk = np.arange(20_000) % 997
    sequences = [np.append(trunk, [k, k]) for k in range(500)]
    start = time.perf_counter()
    tree = PrefixTree.from_sequences(sequences)
    assert time.perf_counter() - start < 2.0  # 0.1 s on one core; a loop over 10M tokens takes longer
    assert tree.num_rows == 20_000 + 2 * 500


# Data sets of real rollouts, one file each. An archive holds `tokens` of all episodes, their `offsets`, and per
# episode `turn_ptr` into `turn_end`, the position at which each model turn ends.
ROLLOUTS = sorted(Path(os.environ["HARTS_ROLLOUTS"]).glob("*.npz")) if os.environ.get("HARTS_ROLLOUTS") else []
NO_ROLLOUTS = pytest.param(
    Path("none"), marks=pytest.mark.skip(reason="needs HARTS_ROLLOUTS, the path of a folder with rollouts as *.npz")
)


def read_rollouts(path, step_wise):
    """Trajectories of a data set: its episodes, or one per model turn, with the whole context before the turn."""
    with np.load(path) as data:
        tokens, offsets, turn_ptr, turn_end = (data[k] for k in ("tokens", "offsets", "turn_ptr", "turn_end"))
    episodes = [tokens[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if not step_wise:
        return episodes
    return [e[:n] for k, e in enumerate(episodes) for n in turn_end[turn_ptr[k] : turn_ptr[k + 1]]]


def count_prefixes(sequences, rng):
    """Distinct prefixes, by random 64-bit hashes: of S = 1e7 prefixes, two collide once in about 1e5 runs."""
    longest = max(map(len, sequences))
    of_position = rng.integers(0, 2**64, longest, dtype=np.uint64)
    of_token = rng.integers(0, 2**64, 1 + max(int(s.max()) for s in sequences), dtype=np.uint64)
    return len(np.unique(np.concatenate([np.cumsum(of_token[s] * of_position[: len(s)]) for s in sequences])))


def sum_of_lengths_less_lcps(sequences):
    """Compact work by its definition: sum of lengths less the sum of adjacent common prefixes, in sorted order."""
    ordered = sorted(s.astype(">i4").tobytes() for s in sequences)
    shared = 0
    for a, b in zip(ordered[:-1], ordered[1:], strict=True):
        n = min(len(a), len(b)) // 4
        differs = np.frombuffer(a, ">i4", n) != np.frombuffer(b, ">i4", n)
        shared += int(differs.argmax()) if differs.any() else n
    return sum(map(len, sequences)) - shared


@pytest.mark.parametrize("step_wise", [False, True], ids=["episodes", "step_wise"])
@pytest.mark.parametrize("path", ROLLOUTS or [NO_ROLLOUTS], ids=lambda path: path.stem)
def test_rollouts(path, step_wise):
    sequences = read_rollouts(path, step_wise)[:400]
    tree = PrefixTree.from_sequences(sequences)
    assert tree.num_rows == sum_of_lengths_less_lcps(sequences)
    assert tree.num_rows == count_prefixes(sequences, np.random.default_rng(0))
    assert tree.counts.sum() == tree.num_tokens == sum(map(len, sequences))
    assert (tree.parent < np.arange(tree.num_rows)).all()
    for i in np.random.default_rng(1).integers(0, len(sequences), 20):
        np.testing.assert_array_equal(tree.token_ids[tree.rows(int(i))], sequences[i])
