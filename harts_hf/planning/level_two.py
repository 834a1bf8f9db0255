"""Level two: a plan with sharing windows, never worse than the plan without.

Candidates: for a few numbers of slots, up to those of the plan without windows, the exact program over windows at
several limits of rows, placed on the grid and refined: trajectories then move between consumers, windows and plain
microbatches. The best of them are levelled too, the best of those annealed unless its slots are even. A quick plan
without windows says how many slots it takes; the plan without windows is made in full, and is a candidate, unless a
lower bound says that it is worse.
"""

from functools import partial

import numpy as np

from .align import align
from .anneal import anneal_uneven
from .bounds import beats_plans_without_windows
from .draft import Draft, SharedPrefix
from .level import level
from .level_one import plan_without_windows
from .ranking import most_promising, rank
from .refine import refine
from .reseat import reseat
from .units import Units
from .window_partition import Range, cheapest_windows, shared_prefixes
from .window_placement import place_windows

LIMIT_GRID = 64  # limits are multiples of the budget's share, so that one program serves several numbers of slots
LIMIT_STEPS = (0.03, 0.1, 0.3, 1.0)  # where limits lie between the smallest that fits and the budget
PENALTIES = (0.0, 0.06)  # work that a range is taken to cost in addition, as a share of the limit
COARSE_UNITS = 600  # units of the exact program; refinement moves the finer ones
LEVELLED = 2  # refined candidates that are levelled
LEVEL_ROUNDS = 2  # with placement improved in between
LEVEL_STEPS = 60_000  # units of a round, at most
LEVEL_STEPS_PER_SEAT = 5  # units of a round for each unit and bin, at most: annealing serves small drafts better
EVEN_ENOUGH = 0.985  # a draft whose balance by work is above is not annealed
ANNEALED = 2  # of those, drafts that are annealed
ANNEAL_STEPS = 150_000  # units of a round
ANNEAL_HEATS = (1.0, 0.5, 0.2, 0.1, 0.02)  # its rounds, with placement improved in between


def plan_with_windows(
    units: Units, max_rows: int, num_replicas: int, max_prefix: int, objective: tuple[int, ...]
) -> Draft:
    """The best refined candidate, or the plan without windows.

    Args:
        units, max_rows, num_replicas: as for `plan_without_windows`.
        max_prefix: longest prefix that a window may share, in rows.
        objective: order of comparison, indices into `Draft.objectives()`.
    """
    search = _Search(units, max_rows, max_prefix)
    if not shared_prefixes(search.coarse, max_rows, max_prefix):
        return plan_without_windows(units, max_rows, num_replicas, objective)
    plain = plan_without_windows(units, max_rows, num_replicas, objective, quick=True)
    if plain.num_slots == 1:
        return plan_without_windows(units, max_rows, num_replicas, objective)
    least = -(-units.total_rows // (max_rows * num_replicas))
    natural = [-(-search.num_ranges(max_rows, penalty) // num_replicas) for penalty in PENALTIES]
    middle = (least + plain.num_slots) // 2
    slot_counts = {middle, (middle + min(*natural, plain.num_slots)) // 2, *natural}
    drafts: list[Draft] = []
    for num_slots in [*sorted({min(max(2, n), plain.num_slots) for n in slot_counts}), plain.num_slots]:
        if num_slots == plain.num_slots and drafts:
            break
        for penalty in PENALTIES:
            drafts += search.candidates(num_slots, num_replicas, penalty)
    drafts = most_promising(drafts, objective)
    for draft in drafts:
        refine(draft, objective)
        reseat(draft)
        refine(draft, objective)
        align(draft, for_free=objective[0] == 0)
        reseat(draft)
    drafts.sort(key=lambda draft: rank(draft, objective))
    for draft in drafts[:LEVELLED]:
        level_steps = min(LEVEL_STEPS, LEVEL_STEPS_PER_SEAT * len(units) * len(draft.bins))
        for _ in range(LEVEL_ROUNDS):
            level(draft, objective, level_steps)
            reseat(draft)
    drafts.sort(key=lambda draft: rank(draft, objective))
    for draft in drafts[:ANNEALED]:
        anneal_uneven(
            draft,
            objective,
            partial(reseat, draft),
            even_enough=EVEN_ENOUGH,
            heats=ANNEAL_HEATS,
            unit_steps=ANNEAL_STEPS,
            max_prefix=max_prefix,
        )
    best = min([plain, *drafts], key=lambda draft: rank(draft, objective))
    if not beats_plans_without_windows(best, objective):
        plain = plan_without_windows(units, max_rows, num_replicas, objective)
    return min([plain, best], key=lambda draft: rank(draft, objective))


class _Search:
    """Placed partitions of one step; the exact program's results are kept by limit and penalty."""

    def __init__(self, units: Units, max_rows: int, max_prefix: int):
        self.units, self.max_rows, self.max_prefix = units, max_rows, max_prefix
        self.coarse = units.coarsened(COARSE_UNITS, max_rows)
        self.fine = np.searchsorted(units.first, self.coarse.first).tolist()  # first unit of each coarse one
        self.solved: dict[tuple[int, float], tuple[list[Range], list[SharedPrefix]]] = {}

    def num_ranges(self, limit: int, penalty: float) -> int:
        """Ranges of the exact program's result."""
        return len(self._solve(limit, penalty)[0])

    def candidates(self, num_slots: int, num_replicas: int, penalty: float) -> list[Draft]:
        """Drafts on a grid: at the smallest limit of rows that bisection finds to fit, and at some above."""

        def build(step: int) -> Draft | None:
            limit = -(-self.max_rows * step // LIMIT_GRID)
            ranges, windows = self._solve(limit, penalty)
            return place_windows(self.units, ranges, windows, limit, self.max_rows, num_slots, num_replicas)

        least = -(-self.units.total_rows // (num_slots * num_replicas))
        low, high = min(least * LIMIT_GRID // self.max_rows, LIMIT_GRID), LIMIT_GRID
        drafts = []
        while low < high:
            middle = (low + high) // 2
            draft = build(middle)
            if draft is None:
                low = middle + 1
            else:
                high = middle
                drafts.append(draft)
        drafts = drafts[-2:]
        for step in sorted({high + round(share * (LIMIT_GRID - high)) for share in LIMIT_STEPS}):
            draft = build(step)
            if draft is not None:
                drafts.append(draft)
        return drafts

    def _solve(self, limit: int, penalty: float) -> tuple[list[Range], list[SharedPrefix]]:
        if (limit, penalty) not in self.solved:
            prefixes = shared_prefixes(self.coarse, limit, self.max_prefix)
            ranges, windows = cheapest_windows(self.coarse, limit, prefixes, round(penalty * limit))
            fine = self.fine
            self.solved[limit, penalty] = (
                [Range(fine[r.start], fine[r.end], r.window) for r in ranges],
                [SharedPrefix(fine[w.start], fine[w.end], w.tokens) for w in windows],
            )
        return self.solved[limit, penalty]
