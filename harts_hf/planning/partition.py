"""Cheapest partition of ordered units into contiguous ranges: an exact dynamic program.

Units stand in a depth-first order of the prefix tree. A range `[i, j)` of units holds
`opening[i] + sum(added[i + 1:j])` rows, and starting a range at unit `i` costs `cut_work[i]`: the work of the prefix
that unit `i` shares with its left neighbour, which is then computed once more. The cost of a partition is the sum of
the cut work at its starts; only the start of a range matters, so the program is a sliding-window minimum and linear in
units.

Candidate space: every partition into contiguous ranges, each within the limit of rows; a single unit above the limit
is a range of its own. Non-contiguous sets are outside of it.
"""

from collections import deque

import numpy as np


def first_starts(opening: np.ndarray, added: np.ndarray, limit: int) -> np.ndarray:
    """For each end `j`, the first start `i` such that the range `[i, j)` holds at most `limit` rows.

    Args:
        opening: `[U]`, int64: rows of each unit alone.
        added: `[U]`, int64: rows that each unit adds to its left neighbour, at most `opening`.
        limit: most rows of a range.

    Returns:
        `[U + 1]`, int64, non-decreasing; entry `j` is at most `j - 1`, so a single unit is always allowed. Entry 0 is
        0.
    """
    offsets = np.concatenate([[0], np.cumsum(added)])
    # rows[i, j) = opening[i] - offsets[i + 1] + offsets[j]; the part of i does not decrease as i grows
    shared = offsets[1:] - opening
    starts = np.searchsorted(shared, offsets - limit, side="left")
    starts[1:] = np.minimum(starts[1:], np.arange(len(opening)))
    starts[0] = 0
    return starts


def cheapest_partition(
    cut_work: np.ndarray, starts: np.ndarray, num_ranges: int | None = None, *, most: bool = False
) -> list[int] | None:
    """Starts of the ranges of the cheapest partition.

    Without `num_ranges`: least cost, then fewest (or most) ranges; time linear in units. With it: least cost among
    partitions into exactly that many ranges. The cost is convex in the number of ranges (starting costs depend on the
    start alone and every part of an allowed range is allowed, so the Monge condition holds), therefore a penalty per
    range, found by bisection, reaches every count; a count between two optima of one penalty is spliced from both.

    Args:
        cut_work: `[U]`, int64, non-negative: cost of starting a range at each unit; entry 0 is not counted.
        starts: `[U + 1]` from [`first_starts`].
        num_ranges: exact number of ranges, or `None`.
        most: without `num_ranges`, ties go to the most ranges.

    Returns:
        Increasing starts, the first is 0; `None` if there is no partition into `num_ranges` ranges.
    """
    cost = cut_work.tolist()
    cost[0] = 0
    window = starts.tolist()
    if num_ranges is None:
        return _solve(cost, window, 0, fewest=not most)
    if num_ranges > len(cost):
        return None
    least = _solve([0] * len(cost), window, 1, fewest=True)
    if num_ranges < len(least):
        return None
    # the penalty lies in (-max(cost), sum(cost)]: below it every unit is a range, above it ranges are as few as can be
    low, high = -max(cost) - 1, sum(cost) + 1
    while low < high:
        middle = (low + high) // 2
        if len(_solve(cost, window, middle, fewest=True)) <= num_ranges:
            high = middle
        else:
            low = middle + 1
    few = _solve(cost, window, low, fewest=True)
    if len(few) == num_ranges:
        return few
    return _splice(few, _solve(cost, window, low, fewest=False), num_ranges, len(cost))


def _solve(cost: list[int], window: list[int], penalty: int, fewest: bool) -> list[int]:
    """Least `sum(cost + penalty)` over the starts; ties go to the fewest or to the most ranges."""
    num_units = len(cost)
    scale = num_units + 1  # one integer holds (cost, count): the count stays below scale
    step = penalty * scale + (1 if fewest else -1)
    previous = [0] * (num_units + 1)
    best = 0
    candidates: deque[tuple[int, int]] = deque()  # (value, start), values increasing
    for end in range(1, num_units + 1):
        start = end - 1
        value = best + cost[start] * scale + step
        while candidates and candidates[-1][0] > value:
            candidates.pop()
        candidates.append((value, start))
        first = window[end]
        while candidates[0][1] < first:
            candidates.popleft()
        best, previous[end] = candidates[0]
    ranges = []
    end = num_units
    while end > 0:
        end = previous[end]
        ranges.append(end)
    return ranges[::-1]


def _splice(few: list[int], many: list[int], num_ranges: int, num_units: int) -> list[int]:
    """A partition into `num_ranges` ranges from two optima of one penalty, with fewer and with more ranges.

    Where a range of `many` lies inside a range of `few`, going from the one's starts to the other's keeps the optimum
    (Monge), and the surplus of `many` over `few` grows by at most one from range to range.
    """
    few_ends = [*few[1:], num_units]
    many_ends = [*many[1:], num_units]
    for k, start in enumerate(few):
        inner = k + len(many) - num_ranges  # range of `many` after which its starts are taken
        if inner >= 0 and start <= many[inner] and many_ends[inner] <= few_ends[k]:
            return few[: k + 1] + many[inner + 1 :]
    raise AssertionError("no splice: the cost is not Monge")
