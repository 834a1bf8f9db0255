"""Local search on packings: a few bins are packed again by the exact program, in a new depth-first order.

A heuristic. Children of a fork may stand in any order, and each order has its own contiguous partitions. A step takes
a few bins, puts their units in a random depth-first order, partitions them at least cost, and keeps the result if the
total work, or else the number of bins, does not grow. Random choices come from a fixed seed.
"""

from random import Random

import numpy as np

from .partition import cheapest_partition, first_starts
from .units import Units

SEED = 0
UNIT_STEPS = 40_000  # units packed again, over all steps
STEP_OVERHEAD = 20  # a step costs as much as packing this many units
PATIENCE = 40  # steps without a gain, for each bin, after which the search ends
BINS_TAKEN = (2, 3, 4)


def repack(units: Units, bins: list[list[int]], max_rows: int) -> list[list[int]]:
    """Bins of no more total work, and no more of them, than the given ones.

    Args:
        units: ordered units.
        bins: increasing lists of units.
        max_rows: most rows of a bin; a unit above it stays a bin of its own.
    """
    random = Random(SEED)
    fixed = [members for members in bins if units.unit_rows[members[-1]] > max_rows]
    bins = [members for members in bins if units.unit_rows[members[-1]] <= max_rows]
    unit_steps = UNIT_STEPS
    idle_steps = 0
    while len(bins) > 1 and unit_steps > 0 and idle_steps < PATIENCE * len(bins) + 100:
        first = random.randrange(len(bins))
        taken = {first} | {random.randrange(len(bins)) for _ in range(random.choice(BINS_TAKEN) - 1)}
        if len(taken) == 1:
            unit_steps -= 1
            continue
        members = sorted(u for b in taken for u in bins[b])
        unit_steps -= len(members) + STEP_OVERHEAD
        packed = _partition(units, members, max_rows, random)
        before = [bins[b] for b in sorted(taken)]
        after, until_now = (_saved(units, packed), -len(packed)), (_saved(units, before), -len(before))
        idle_steps = 0 if after > until_now else idle_steps + 1
        if after >= until_now:
            bins = [members for b, members in enumerate(bins) if b not in taken] + packed
    return fixed + bins


def _partition(units: Units, members: list[int], max_rows: int, random: Random) -> list[list[int]]:
    order, cuts = _random_order(units, members, random)
    rows = units.rows[order]
    cut = np.array(cuts)
    starts = cheapest_partition(units.cost.shared_work(cut), first_starts(rows, rows - cut, max_rows))
    return [sorted(order[s:e]) for s, e in zip(starts, [*starts[1:], len(order)], strict=True)]


def _random_order(units: Units, members: list[int], random: Random) -> tuple[list[int], list[int]]:
    """Units in a random depth-first order of their tree, and each one's LCP with the one before it."""
    between = [0] + [units.lcp(a, b) for a, b in zip(members, members[1:], strict=False)]
    order: list[int] = []
    cuts: list[int] = []
    pending = [(0, len(members), 0)]  # a subtree and its LCP with what stands before it
    while pending:
        start, end, cut = pending.pop()
        if end - start == 1:
            order.append(members[start])
            cuts.append(cut)
            continue
        fork = min(between[start + 1 : end])
        bounds = [start, *(k for k in range(start + 1, end) if between[k] == fork), end]
        children = list(zip(bounds, bounds[1:], strict=False))
        random.shuffle(children)
        # the first child stands next to what is before the subtree
        pending += [(s, e, fork) for s, e in children[:0:-1]]
        pending.append((*children[0], cut))
    return order, cuts


def _saved(units: Units, bins: list[list[int]]) -> int:
    """Work that the units of the bins save by sharing."""
    shared_work, lcp = units.cost.shared_work, units.lcp
    return sum(shared_work(lcp(a, b)) for members in bins for a, b in zip(members, members[1:], strict=False))
