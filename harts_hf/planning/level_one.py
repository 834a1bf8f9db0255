"""Level one: the best plan without sharing across microbatches.

Candidates, for the fewest slots that any of them needs and for the slots of the cheapest contiguous partition:

- the exact program with as many contiguous ranges as the slots have cells, at several limits of rows between the
  smallest that still fits and the budget;
- greedy packings, in two orders and by two rules, and packings by filling, of pieces: natural pieces of several
  grains, and the ranges of the exact program when ranges may be joined again for free;
- the cheapest partition and the packings that look best, repacked a few bins at a time, two of them for longer.

Each is placed by work. For each number of slots the best few are refined, aligned to the grid and compared once more.
Fewer slots win unless more of them lower the first objective by more than `SLOT_GAIN`: a slot has a cost of its own.
If total work comes first, a cell that costs work to fill stays empty. The plan is annealed at last.
"""

import numpy as np

from .align import align
from .anneal import anneal_uneven
from .bounds import least_rows
from .contiguous import contiguous_packings, fewest_ranges
from .draft import Bin, Draft
from .level import level
from .packing import ORDERS, pack, pack_by_filling
from .partition import cheapest_partition, first_starts
from .placement import place
from .ranking import most_promising, rank, with_least_work
from .refine import refine
from .repack import repack
from .units import Units

GRAINS = (1, 4, 16)  # natural pieces hold at most the budget divided by one of these
FILLED_GRAINS = (1, 2)  # the same for packings by filling
SLOT_GAIN = 0.01  # share of the first objective that a plan with more slots has to gain
TRIED = 3  # packings that are repacked: of least work and, one of them, of fewest bins
TRIAL_STEPS = 10_000  # units that each of those is repacked by
REPACKED = 2  # of the results, packings that are repacked for longer, chosen likewise
UNIT_STEPS = 80_000  # units that each of those is repacked by, and the best of them once more
WORK_UNIT_STEPS = 120_000  # the same if total work decides alone, as with one replica: nothing is levelled then
LEVELLED = 2  # refined candidates that are levelled
LEVEL_STEPS = 40_000  # units that each of those is levelled by
WORK_LEVEL_STEPS = 100_000  # the same if total work comes first: nothing is evened then
ANNEAL_STEPS = 300_000  # units of each round by which the best draft is annealed
ANNEAL_HEATS = (0.3, 0.1, 0.03)  # its rounds, with placement in between
EVEN_ENOUGH = 0.995  # a draft whose balance by work is above is not annealed
EVENED = 2  # refined candidates that are repacked towards even bins
EVEN_STEPS = 40_000  # units that each of those is repacked by


def plan_without_windows(
    units: Units, max_rows: int, num_replicas: int, objective: tuple[int, ...], quick: bool = False
) -> Draft:
    """The best refined candidate.

    Args:
        units: what is planned.
        max_rows: most rows of a microbatch; a unit above it is one of its own.
        num_replicas: microbatches of a slot.
        objective: order of comparison, indices into `Draft.objectives()`.
        quick: leave out what takes longest, repacking for longer and all evening: more work, about as many slots.
    """
    starts = first_starts(units.rows, units.added_rows, max_rows)
    cheapest = cheapest_partition(units.cut_work, starts)
    pieces = [units.natural_pieces(max(1, max_rows // grain)) for grain in GRAINS]
    # every microbatch computes what all units share, so a cut there is free if the range joins another one
    common = int(units.cut_work[1:].min(initial=0)) if len(units) > 1 else 0
    joinable = cheapest_partition(np.maximum(units.cut_work - common, 0), starts, most=True)
    pieces.append(list(zip(joinable, [*joinable[1:], len(units)], strict=True)))
    packings = [pack(units, p, max_rows, None, order, "fullest") for p in pieces for order in ORDERS]
    work_first = objective[0] == 0
    unit_steps = 0 if quick else WORK_UNIT_STEPS if work_first or num_replicas == 1 else UNIT_STEPS
    packings += _repacked(units, max_rows, unit_steps, cheapest, pieces[-1], min(packings, key=len))
    fewest = min(fewest_ranges(units, max_rows), *map(len, packings))

    drafts = []
    for num_slots in sorted({-(-fewest // num_replicas), -(-len(cheapest) // num_replicas)}):
        num_cells = num_slots * num_replicas
        candidates = [bins for bins in packings if len(bins) <= num_cells]
        candidates += contiguous_packings(units, max_rows, num_cells)
        candidates += [pack(units, p, max_rows, num_cells, "largest first", "lightest") for p in pieces]
        drafts += [_placed(units, bins, max_rows, num_slots, num_replicas) for bins in candidates if bins is not None]
    best: list[Draft] = []
    for num_slots in sorted({draft.num_slots for draft in drafts}):
        of_size = most_promising([draft for draft in drafts if draft.num_slots == num_slots], objective)
        for draft in of_size:
            refine(draft, objective)
            align(draft, for_free=work_first)
            place(draft.bins, num_replicas)
        of_size.sort(key=lambda draft: rank(draft, objective))
        if num_replicas > 1 and not work_first and not quick:
            evened = [_evened(draft) for draft in of_size[:EVENED]]
            of_size += [draft for draft in evened if draft.num_slots == num_slots]
            of_size.sort(key=lambda draft: rank(draft, objective))
        for draft in with_least_work(of_size, LEVELLED) if num_replicas > 1 and not quick else []:
            level(draft, objective, WORK_LEVEL_STEPS if work_first else LEVEL_STEPS)
            place(draft.bins, num_replicas)
        best.append(min(of_size, key=lambda draft: rank(draft, objective)))
    chosen = best[0]
    for draft in best[1:]:
        if rank(draft, objective)[0] < (1 - SLOT_GAIN) * rank(chosen, objective)[0]:
            chosen = draft
    if not quick:
        anneal_uneven(
            chosen,
            objective,
            lambda: place(chosen.bins, num_replicas),
            even_enough=EVEN_ENOUGH,
            heats=ANNEAL_HEATS,
            unit_steps=ANNEAL_STEPS,
        )
    return chosen


def _repacked(
    units: Units,
    max_rows: int,
    unit_steps: int,
    cheapest: list[int],
    joinable: list[tuple[int, int]],
    packing: list[list[int]],
) -> list[list[list[int]]]:
    """Repacked partitions and packings: a few for a short while, the cheapest for longer."""
    started = [packing, [list(range(s, e)) for s, e in zip(cheapest, [*cheapest[1:], len(units)], strict=True)]]
    grains = [units.natural_pieces(max(1, max_rows // grain)) for grain in FILLED_GRAINS]
    started += [pack_by_filling(units, pieces, max_rows) for pieces in (joinable, *grains)]
    by_work, by_count = _sorted_by_work(units, started, max_rows), sorted(started, key=len)
    least = least_rows(units, max_rows)
    tried = [
        repack(units, bins, max_rows, TRIAL_STEPS, bound_rows=least) for bins in _first_few(by_work, by_count, TRIED)
    ]
    by_work, by_count = _sorted_by_work(units, tried, max_rows), sorted(tried, key=len)
    if not unit_steps:
        return tried
    longer = [
        repack(units, bins, max_rows, unit_steps, bound_rows=least) for bins in _first_few(by_work, by_count, REPACKED)
    ]
    again = repack(units, _sorted_by_work(units, longer, max_rows)[0], max_rows, unit_steps, bound_rows=least)
    return [*tried, *longer, again]


def _first_few(by_work: list[list[list[int]]], by_count: list[list[list[int]]], most: int) -> list[list[list[int]]]:
    """The packing of least work, the one of fewest bins, then the others by work."""
    chosen = [by_work[0], *(bins for bins in by_count[:1] if bins is not by_work[0])]
    return [*chosen, *(bins for bins in by_work if not any(bins is c for c in chosen))][:most]


def _sorted_by_work(units: Units, packings: list[list[list[int]]], max_rows: int) -> list[list[list[int]]]:
    """Packings by total work, then by number of bins."""

    def value(bins: list[list[int]]) -> tuple[int, int]:
        return Draft(units, max_rows, 1, [Bin(members) for members in bins]).total_work, len(bins)

    return sorted(packings, key=value)


def _evened(draft: Draft) -> Draft:
    """A draft whose bins are packed again, for less total work and more even rows; aligned to the same grid."""
    members = [b.members for b in draft.bins if b.members]
    packed = repack(draft.units, members, draft.max_rows, EVEN_STEPS, even=True)
    evened = _placed(draft.units, packed, draft.max_rows, draft.num_slots, draft.num_replicas)
    align(evened)
    place(evened.bins, draft.num_replicas)
    return evened


def _placed(units: Units, packing: list[list[int]], max_rows: int, num_slots: int, num_replicas: int) -> Draft:
    """A packing on a grid that has a cell for each of its bins."""
    empty = num_slots * num_replicas - len(packing)
    draft = Draft(units, max_rows, num_replicas, [Bin(m) for m in packing] + [Bin([]) for _ in range(empty)])
    place(draft.bins, num_replicas)
    return draft
