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
    critical_bound = least_slot_critical_rows(units, limit, num_replicas)
    for partition in set_partitions(list(range(len(units)))):
        rows = [units.charge(members)[0] for members in partition]
        if all(r <= limit or len(members) == 1 for r, members in zip(rows, partition, strict=True)):
            assert sum(rows) >= bound[len(partition)] >= bound[1], f"seed {seed}"
            assert slot_critical(rows, num_replicas) >= critical_bound, f"seed {seed}"


def test_bounds_are_met_without_waste():
    prompt = list(range(20))
    sequences = [[*prompt, *range(100 * k, 100 * k + 10)] for k in range(1, 13)]
    units = Units.from_tree(PrefixTree.from_sequences(sequences), CostModel())
    assert least_rows(units, 50) == 12 * 10 + 4 * 20, "three branches a microbatch"
    assert least_rows(units, 50, 6) == 12 * 10 + 6 * 20
    assert least_slot_critical_rows(units, 50, 4) == 50
    assert least_rows(units, 40) == 12 * 10 + 6 * 20
    assert least_rows(units, 25) == 12 * 30, "all above the limit run alone"
