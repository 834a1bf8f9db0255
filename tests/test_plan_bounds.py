"""No plan computes fewer rows than the lower bounds say; the bounds are met where nothing is wasted."""

import numpy as np
import pytest

from harts_hf.planning.bounds import least_rows, least_slot_critical_rows
from harts_hf.planning.cost import CostModel
from harts_hf.planning.units import Units
from harts_hf.tree import PrefixTree


def set_partitions(items):
    """All partitions of a list into non-empty sets."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for k in range(len(partition)):
            yield [*partition[:k], [first, *partition[k]], *partition[k + 1 :]]


def slot_critical(rows, num_replicas):
    """Least sum of the slots' heaviest microbatches: longest first."""
    return sum(sorted(rows, reverse=True)[::num_replicas])


@pytest.mark.parametrize("seed", range(150))
def test_bounds_hold_for_every_set_partition(seed):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(0, 2, rng.integers(1, 14)).tolist() for _ in range(rng.integers(1, 8))]
    units = Units.from_tree(PrefixTree.from_sequences(sequences), CostModel())
    limit, num_replicas = int(rng.integers(3, 40)), int(rng.integers(1, 4))
    bound = {n: least_rows(units, limit, n) for n in range(1, len(units) + 1)}
    exact_units = int(rng.integers(2, 9))
    exact = {n: least_rows(units, limit, n, exact_units) for n in bound}
    critical_bound = least_slot_critical_rows(units, limit, num_replicas, exact[1])
    least = None
    for partition in set_partitions(list(range(len(units)))):
        rows = [units.charge(members)[0] for members in partition]
        if all(r <= limit or len(members) == 1 for r, members in zip(rows, partition, strict=True)):
            assert sum(rows) >= exact[len(partition)] >= bound[len(partition)] >= bound[1], f"seed {seed}"
            assert slot_critical(rows, num_replicas) >= critical_bound, f"seed {seed}"
            least = sum(rows) if least is None else min(least, sum(rows))
    if exact_units >= len(units):
        assert exact[1] == least, f"seed {seed}: exact where all units are counted as sets"


def test_duplicates_below_a_segment_count_above_it():
    """Two branches of 50 rows on a prompt of 20, each in two microbatches: the prompt is in four, not in three."""
    branches = [[*range(20), *range(100 * tree, 100 * tree + 50)] for tree in (1, 2)]
    sequences = [[*b, *range(1000 + 100 * k, 1016 + 100 * k)] for k, b in enumerate(branches * 2)]
    units = Units.from_tree(PrefixTree.from_sequences(sequences), CostModel())
    assert units.total_rows - 20 < 3 * (100 - 20), "the distinct rows below the prompt would fit three"
    assert least_rows(units, 100) == least_rows(units, 100, exact_units=4) == 4 * 86


def test_bounds_are_met_without_waste():
    prompt = list(range(20))
    sequences = [[*prompt, *range(100 * k, 100 * k + 10)] for k in range(1, 13)]
    units = Units.from_tree(PrefixTree.from_sequences(sequences), CostModel())
    assert least_rows(units, 50) == 12 * 10 + 4 * 20, "three branches a microbatch"
    assert least_rows(units, 50, 6) == 12 * 10 + 6 * 20
    assert least_slot_critical_rows(units, 50, 4) == 50
    assert least_rows(units, 40) == 12 * 10 + 6 * 20
    assert least_rows(units, 25) == 12 * 30, "all above the limit run alone"
