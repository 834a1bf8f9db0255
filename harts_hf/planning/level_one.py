"""Level one: the best plan without sharing across microbatches.

Candidates: for the fewest slots that a contiguous partition or a packing needs, and for the slots of the cheapest
partition, the exact program with as many ranges as the slots have cells, at several limits of rows between the smallest
that still fits and the budget; and greedy packings of natural pieces. Each is placed by work; the best few are refined.
"""

import numpy as np

from .draft import Bin, Draft
from .packing import ORDERS, pack
from .partition import cheapest_partition, first_starts
from .placement import place
from .refine import refine
from .units import Units

LIMIT_STEPS = (0.0, 0.06, 0.125, 0.25, 0.5, 1.0)  # where limits lie between the smallest and the budget
REFINED = 3  # candidates that are refined


def plan_without_windows(units: Units, max_rows: int, num_replicas: int, objective: tuple[int, ...]) -> Draft:
    """The best refined candidate.

    Args:
        units: what is planned.
        max_rows: most rows of a microbatch; a unit above it is one of its own.
        num_replicas: microbatches of a slot.
        objective: order of comparison, indices into `Draft.objectives()`.
    """
    pieces = units.natural_pieces(max_rows)
    packings = [pack(units, pieces, max_rows, None, order, "fullest") for order in ORDERS]
    cheapest = cheapest_partition(units.cut_work, first_starts(units.rows, units.added_rows, max_rows))
    fewest = min(fewest_ranges(units, max_rows), *map(len, packings))
    slot_counts = sorted({-(-fewest // num_replicas), -(-len(cheapest) // num_replicas)})

    candidates = []
    for num_slots in slot_counts:
        candidates += _contiguous(units, max_rows, num_slots * num_replicas)
        grains = sorted({max_rows, max_rows // 4, max(1, max_rows // 16)}, reverse=True)
        for grain in grains:
            finer = units.natural_pieces(grain)
            if len(finer) >= num_slots * num_replicas:
                packing = pack(units, finer, max_rows, num_slots * num_replicas, "largest first", "lightest")
                candidates += [packing] if packing else []
    candidates += packings

    drafts = []
    for members in candidates:
        draft = Draft(units, max_rows, num_replicas, [Bin(m) for m in members])
        place(draft.bins, num_replicas)
        drafts.append(draft)
    drafts.sort(key=lambda draft: rank(draft, objective))
    drafts = drafts[:REFINED]
    for draft in drafts:
        refine(draft, objective)
        before = rank(draft, objective)
        seats = [(b.slot, b.replica) for b in draft.bins]
        place(draft.bins, num_replicas)
        if rank(draft, objective) > before:
            for b, (b.slot, b.replica) in zip(draft.bins, seats, strict=True):
                pass
    return min(drafts, key=lambda draft: rank(draft, objective))


def rank(draft: Draft, objective: tuple[int, ...]) -> tuple[int, ...]:
    """What plans are compared by: the objectives in order, then fewer slots."""
    values = draft.objectives()
    return (*(values[k] for k in objective), draft.num_slots)


def fewest_ranges(units: Units, limit: int) -> int:
    """Ranges that a contiguous partition within the limit needs at least: each is filled until nothing more fits."""
    offsets, cuts = units.row_offsets, units.cut
    start, count = 0, 0
    while start < len(units):
        room = limit - cuts[start] + offsets[start]
        start = max(start + 1, int(np.searchsorted(offsets, room, side="right")) - 1)
        count += 1
    return count


def smallest_limit(units: Units, max_rows: int, num_ranges: int) -> int:
    """The least limit at which at most `num_ranges` contiguous ranges hold all units; at most `max_rows`."""
    fitting = units.rows[units.rows <= max_rows]
    low = max(int(fitting.max(initial=1)), -(-units.total_rows // num_ranges)) if len(fitting) == len(units) else 1
    low = min(max(low, int(fitting.max(initial=1))), max_rows)
    high = max_rows
    while low < high:
        middle = (low + high) // 2
        if fewest_ranges(units, middle) <= num_ranges:
            high = middle
        else:
            low = middle + 1
    return low


def _contiguous(units: Units, max_rows: int, num_cells: int) -> list[list[list[int]]]:
    """Exact partitions into as many ranges as there are cells, or into all units if those are fewer."""
    num_ranges = min(num_cells, len(units))
    smallest = smallest_limit(units, max_rows, num_ranges)
    partitions = []
    for step in LIMIT_STEPS:
        limit = round(smallest + step * (max_rows - smallest))
        starts = cheapest_partition(units.cut_work, first_starts(units.rows, units.added_rows, limit), num_ranges)
        if starts is not None:
            ends = [*starts[1:], len(units)]
            partitions.append([list(range(s, e)) for s, e in zip(starts, ends, strict=True)])
    return partitions
