"""Packings of contiguous ranges of units, each a bin: exact partitions into as many ranges as a grid has cells."""

import numpy as np

from .partition import cheapest_partition, first_starts
from .units import Units

LIMIT_STEPS = (0.0, 0.125, 0.5)  # where limits of rows lie between the smallest that fits and the budget


def contiguous_packings(units: Units, max_rows: int, num_cells: int) -> list[list[list[int]]]:
    """Exact partitions into as many ranges as there are cells, or into all units if those are fewer."""
    num_ranges = min(num_cells, len(units))
    smallest = _smallest_limit(units, max_rows, num_ranges)
    partitions = []
    for limit in sorted({round(smallest + step * (max_rows - smallest)) for step in LIMIT_STEPS}):
        starts = cheapest_partition(units.cut_work, first_starts(units.rows, units.added_rows, limit), num_ranges)
        if starts is not None:
            ends = [*starts[1:], len(units)]
            partitions.append([list(range(s, e)) for s, e in zip(starts, ends, strict=True)])
    return partitions


def fewest_ranges(units: Units, limit: int) -> int:
    """Ranges that a contiguous partition within the limit needs at least: each is filled until nothing more fits."""
    offsets, cuts = units.row_offsets, units.cut
    start, count = 0, 0
    while start < len(units):
        room = limit - cuts[start] + offsets[start]
        start = max(start + 1, int(np.searchsorted(offsets, room, side="right")) - 1)
        count += 1
    return count


def _smallest_limit(units: Units, max_rows: int, num_ranges: int) -> int:
    """The least limit that no unit within the budget exceeds and at which `num_ranges` ranges hold all units."""
    low = int(units.rows[units.rows <= max_rows].max(initial=1))
    high = max_rows
    while low < high:
        middle = (low + high) // 2
        if fewest_ranges(units, middle) <= num_ranges:
            high = middle
        else:
            low = middle + 1
    return low
