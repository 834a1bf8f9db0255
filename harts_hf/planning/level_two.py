"""Level two: a plan with sharing windows, never worse than the plan without.

Candidates: for the fewest slots and one more, the exact program over windows at several limits of rows, placed on the
grid and refined: trajectories then move between consumers, windows and plain microbatches. The plan without windows is
one of the candidates.
"""

from .draft import Draft
from .level_one import REFINED, rank
from .refine import refine
from .units import Units
from .window_partition import Range, cheapest_windows, shared_prefixes
from .window_placement import place_windows

LIMIT_STEPS = (0.0, 0.03, 0.06, 0.125, 0.25, 0.5, 1.0)  # where limits lie between the smallest and the budget
BISECTIONS = 7


def plan_with_windows(plain: Draft, max_prefix: int, objective: tuple[int, ...]) -> Draft:
    """The best refined candidate, or `plain`.

    Args:
        plain: the plan without windows.
        max_prefix: longest prefix that a window may share, in rows.
        objective: order of comparison, indices into `Draft.objectives()`.
    """
    units, max_rows, num_replicas = plain.units, plain.max_rows, plain.num_replicas
    prefixes = shared_prefixes(units, max_rows, max_prefix)
    if plain.num_slots == 1 or not prefixes:
        return plain
    ranges, _ = cheapest_windows(units, max_rows, prefixes)
    fewest = -(-len(ranges) // num_replicas)
    drafts = []
    for num_slots in (fewest, fewest + 1):
        drafts += _candidates(units, max_rows, max_prefix, num_slots, num_replicas)
    drafts.sort(key=lambda draft: rank(draft, objective))
    drafts = drafts[:REFINED]
    for draft in drafts:
        refine(draft, objective)
    return min([plain, *drafts], key=lambda draft: rank(draft, objective))


def _candidates(units: Units, max_rows: int, max_prefix: int, num_slots: int, num_replicas: int) -> list[Draft]:
    """Placed partitions for one size of the grid."""
    solved: dict[int, tuple] = {}

    def solve(limit: int) -> tuple[list[Range], list]:
        if limit not in solved:
            solved[limit] = cheapest_windows(units, limit, shared_prefixes(units, limit, max_prefix))
        return solved[limit]

    low, high = -(-units.total_rows // (num_slots * num_replicas)), max_rows
    low = min(max(low, 1), high)
    for _ in range(BISECTIONS):
        middle = (low + high) // 2
        if len(solve(middle)[0]) <= num_slots * num_replicas:
            high = middle
        else:
            low = middle
    drafts = []
    for step in LIMIT_STEPS:
        limit = round(high + step * (max_rows - high))
        ranges, windows = solve(limit)
        draft = place_windows(units, ranges, windows, limit, max_rows, num_slots, num_replicas)
        if draft is not None:
            drafts.append(draft)
    return drafts
