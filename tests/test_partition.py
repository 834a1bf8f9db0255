"""The exact programs equal brute force over contiguous partitions, with and without windows."""

from functools import lru_cache

import numpy as np
import pytest

import harts_hf.planning.window_partition as window_partition
from harts_hf.planning.cost import CostModel
from harts_hf.planning.draft import Bin, Draft
from harts_hf.planning.partition import cheapest_partition, first_starts
from harts_hf.planning.units import Units
from harts_hf.tree import PrefixTree

COSTS = (CostModel(), CostModel(pair=0.25, replay=0.5, chunk_size=2, producer=3), CostModel(producer=2))


def random_tree(rng, most=10, alphabet=2, longest=9):
    sequences = [rng.integers(0, alphabet, rng.integers(1, longest)).tolist() for _ in range(rng.integers(1, most))]
    return PrefixTree.from_sequences(sequences)


def set_rows(tree, members):
    """Distinct prefixes of sorted trajectories, by definition, from the rows of the tree."""
    return len({int(r) for k in members for r in tree.rows(int(tree.sorted_order[k]))})


def partitions(num):
    for mask in range(1 << (num - 1)):
        starts = [0] + [k for k in range(1, num) if mask >> (k - 1) & 1]
        yield starts, [*starts[1:], num]


@pytest.mark.parametrize("seed", range(500))
def test_partition_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng)
    lengths, lcp = tree.lengths[tree.sorted_order], tree.sorted_lcp
    limit = int(rng.integers(1, 25))
    best = {}
    for starts, ends in partitions(len(lengths)):
        rows = [set_rows(tree, range(s, e)) for s, e in zip(starts, ends, strict=True)]
        if all(r <= limit or e - s == 1 for r, s, e in zip(rows, starts, ends, strict=True)):
            best[len(starts)] = min(best.get(len(starts), sum(rows)), sum(rows))

    def work(starts):
        ends = [*starts[1:], len(lengths)]
        return sum(set_rows(tree, range(s, e)) for s, e in zip(starts, ends, strict=True))

    window = first_starts(lengths, lengths - lcp, limit)
    starts = cheapest_partition(lcp, window)
    assert (work(starts), len(starts)) == min((rows, count) for count, rows in best.items()), f"seed {seed}"
    most = cheapest_partition(lcp, window, most=True)
    assert (work(most), -len(most)) == min((rows, -count) for count, rows in best.items()), f"seed {seed}"
    for count in range(1, len(lengths) + 2):
        starts = cheapest_partition(lcp, window, count)
        if count in best:
            assert (len(starts), work(starts)) == (count, best[count]), f"seed {seed}, {count} ranges"
        else:
            assert starts is None, f"seed {seed}, {count} ranges"


@pytest.mark.parametrize("seed", range(500))
def test_units_and_drafts_count_rows_as_the_tree_does(seed):
    rng = np.random.default_rng(seed)
    tree = random_tree(rng, most=14, alphabet=3)
    units = Units.from_tree(tree, COSTS[seed % 2])
    members = [range(units.first[u], units.first[u + 1]) for u in range(len(units))]
    assert units.total_rows == tree.num_rows
    for coarse in (units, units.coarsened(int(rng.integers(1, 5)), int(rng.integers(1, 12)))):
        fine = np.searchsorted(units.first, coarse.first)
        for start in range(len(coarse)):
            for end in range(start + 1, len(coarse) + 1):
                inside = [k for u in range(fine[start], fine[end]) for k in members[u]]
                assert coarse.range_rows(start, end) == set_rows(tree, inside)
        bins = [Bin([], 0) for _ in range(3)]
        for u in range(len(coarse)):
            bins[rng.integers(3)].members.append(u)
        draft = Draft(coarse, 100, 1, bins)
        for b in bins:
            inside = [k for u in b.members for f in range(fine[u], fine[u + 1]) for k in members[f]]
            assert b.rows == set_rows(tree, inside)
            assert (b.rows, b.work) == draft.charge(b.members, None, False)


@pytest.mark.parametrize("seed", range(500))
def test_windows_equal_brute_force(seed, monkeypatch):
    """All contiguous partitions, with every disjoint choice of runs that share any prefix, producers charged once."""
    monkeypatch.setattr(window_partition, "MIN_GAIN", 10**9)  # keep every fork
    rng = np.random.default_rng(seed)
    units = Units.from_tree(random_tree(rng, most=9), COSTS[seed % 3])
    count, limit, max_prefix = len(units), int(rng.integers(3, 16)), int(rng.integers(1, 12))
    cost = units.cost

    def fits(start, end, shared):
        return end - start == 1 or units.range_rows(start, end) - shared <= limit

    @lru_cache(None)
    def best(start):
        if start == count:
            return 0
        values = []
        for end in range(start + 1, count + 1):
            if fits(start, end, 0):
                work = int(units.range_work(start, end))
                values.append(work + best(end))
                for shared in {int(c) for c in units.cut[1:]} | {max_prefix}:
                    if 0 < shared <= max_prefix and end < count:
                        if all(units.lcp(start, k) >= shared for k in range(start + 1, end)):
                            if units.rows[start] >= shared:
                                opening = cost.replay_work(shared) + cost.producer_work
                                values.append(work + opening + later(start, end, shared))
        return min(values)

    @lru_cache(None)
    def later(first, start, shared):
        values = [10**9]
        for end in range(start + 1, count + 1):
            if units.lcp(first, end - 1) < shared:
                break
            if fits(start, end, shared):
                work = int(units.range_work(start, end)) - cost.prefix_work(shared) + cost.replay_work(shared)
                values.append(work + best(end))
                if end < count:
                    values.append(work + later(first, end, shared))
        return min(values)

    prefixes = window_partition.shared_prefixes(units, limit, max_prefix)
    ranges, windows = window_partition.cheapest_windows(units, limit, prefixes)
    assert [r.start for r in ranges] == [0, *[r.end for r in ranges[:-1]]] and ranges[-1].end == count
    work = window_partition.partition_work(units, ranges, windows)
    if cost.counts_rows:
        assert work == best(0), f"seed {seed}"
    else:  # a shallower prefix than a fork may save replay, which is outside of the candidate space
        assert work >= best(0), f"seed {seed}"
    for k, window in enumerate(windows):
        consumers = [r for r in ranges if r.window == k]
        assert len(consumers) > 1 and window.tokens <= max_prefix
        assert units.lcp(consumers[0].start, consumers[-1].end - 1) >= window.tokens


def test_a_coarse_unit_shares_no_more_than_its_trajectories():
    """Negative control: a window's prefix reaches no deeper than a joined unit's own forks."""
    rng = np.random.default_rng(0)
    shared = 0
    for _ in range(300):
        tree = random_tree(rng, most=14, longest=12)
        units = Units.from_tree(tree, CostModel()).coarsened(4, 12)
        for prefix in window_partition.shared_prefixes(units, 5, 100):
            members = range(units.first[prefix.start], units.first[prefix.end])
            rows = [tree.rows(int(tree.sorted_order[k]))[: prefix.tokens] for k in members]
            longest = max(rows, key=len)
            assert len(longest) == prefix.tokens
            assert all(np.array_equal(r, longest[: len(r)]) for r in rows)
            shared += 1
    assert shared > 100
