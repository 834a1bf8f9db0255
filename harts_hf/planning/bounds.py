"""Lower bounds of what plans without sharing windows compute, from the shape of the tree alone.

A segment that ends at depth `d`, below which all microbatches together compute `R` rows, is computed in every
microbatch that holds one of those rows. Such a microbatch holds at most `limit - d` of them, so the segment is
computed at least `R / (limit - d)` times, rounded up. The bound adds that up over all segments, from the leaves to the
root; it is met where trees fill microbatches without waste. Subtrees of few units can be counted exactly instead:
whatever else a microbatch holds, a plan parts their units into sets within the limit.
"""

import numpy as np

from .draft import Draft
from .units import Units


def least_rows(units: Units, max_rows: int, num_microbatches: int = 1, exact_units: int = 1) -> int:
    """Rows that every plan without windows computes at least. Linear in units, but for the search of valleys.

    Args:
        units: what is planned; their rows are counted, whatever their cost model.
        max_rows: most rows of a microbatch; a unit above it runs alone.
        num_microbatches: microbatches of the plan, at least: each computes what all units within the limit share.
        exact_units: subtrees of up to so many units are counted exactly, in time exponential in it: with 16 up to a
            second each.
    """
    total = int(units.rows[units.rows > max_rows].sum())
    members = np.flatnonzero(units.rows <= max_rows).tolist()
    num_microbatches -= len(units) - len(members)
    if not members:
        return total
    rows = units.rows[members]
    cut = np.array([0, *units.neighbour_lcps(members)])
    rest = Units(first=np.arange(len(members) + 1), rows=rows, work=rows, cut=cut, common=rows, cost=units.cost)
    cuts, alone = rest.cuts, rest.unit_rows
    pending = [(0, len(rest), 0, False)]  # a subtree, the depth from which on its rows count, its children are counted
    counted: list[int] = []
    while pending:
        start, end, above, has_children = pending.pop()
        is_root = end - start == len(rest)
        if end - start == 1:
            counted.append(alone[start] - above)
        elif has_children:
            depth = cuts[rest.valley(start, end)]
            below = counted.pop() + counted.pop()
            count = -(-below // (max_rows - depth))
            if is_root:
                count = max(count, num_microbatches)
            least = (depth - above) * count + below
            if is_root and end - start <= exact_units:
                least = max(least, _least_rows_of_sets(rest, start, end, above, max_rows))
            counted.append(least)
        elif not is_root and end - start <= exact_units:
            counted.append(_least_rows_of_sets(rest, start, end, above, max_rows))
        else:
            middle = rest.valley(start, end)
            depth = cuts[middle]
            pending += [(start, end, above, True), (start, middle, depth, False), (middle, end, depth, False)]
    return total + counted[0]


def beats_plans_without_windows(draft: Draft, objective: tuple[int, ...]) -> bool:
    """Whether the bound says that every plan without windows is worse than a draft; work has to count rows.

    Args:
        objective: order of comparison, indices into `Draft.objectives()`.
    """
    if not draft.units.cost.counts_rows:
        return False
    replicas = 1 if objective[0] == 0 else draft.num_replicas  # that share the first objective, at best evenly
    return draft.objectives()[objective[0]] * replicas < least_rows(draft.units, draft.max_rows)


def _least_rows_of_sets(units: Units, start: int, end: int, above: int, max_rows: int) -> int:
    """Rows beyond depth `above` of the cheapest partition of a few units into sets within the limit.

    Sets need not be contiguous. Dynamic program over subsets as bit masks: the set that holds a subset's first unit,
    then the rest.
    """
    if units.range_rows(start, end) <= max_rows:
        return int(units.range_rows(start, end)) - above
    num_units = end - start
    rows = [0] * (1 << num_units)
    for mask in range(1, 1 << num_units):
        last = mask.bit_length() - 1
        others = mask ^ (1 << last)
        shared = units.lcp(start + others.bit_length() - 1, start + last) if others else 0
        rows[mask] = rows[others] + units.unit_rows[start + last] - shared
    set_rows = np.array(rows)
    within = np.flatnonzero(set_rows <= max_rows)[1:]
    led = [within[within & -within == 1 << first] for first in range(num_units)]  # sets by their first unit
    least = np.zeros(1 << num_units, dtype=np.int64)
    for mask in range(1, 1 << num_units):
        sets = led[(mask & -mask).bit_length() - 1]
        sets = sets[sets & ~mask == 0]
        least[mask] = (set_rows[sets] + least[mask ^ sets]).min() - above
    return int(least[-1])


def least_slot_critical_rows(units: Units, max_rows: int, num_replicas: int, least_total: int = 0) -> int:
    """Sum over slots of the heaviest replica's rows that every plan without windows reaches at least.

    The longest unit runs somewhere, the replicas share all rows evenly at best, and no microbatch holds more rows than
    the sum has: the least sum that all three allow, found by bisection.

    Args:
        units, max_rows: as for [`least_rows`].
        num_replicas: microbatches of a slot.
        least_total: a lower bound of all rows that is known already, as from [`least_rows`] with `exact_units`.
    """
    low = max(int(units.rows.max()), -(-max(units.total_rows, least_total) // num_replicas))
    high = int(units.rows.sum())
    while low < high:
        middle = (low + high) // 2
        if least_rows(units, min(max_rows, middle)) <= middle * num_replicas:
            high = middle
        else:
            low = middle + 1
    return low
