"""Lower bounds of what plans without sharing windows compute, from the shape of the tree alone.

A segment that ends at depth `d` with `R` rows below it is computed in every microbatch that holds one of those rows.
Such a microbatch holds at most `limit - d` of them, so the segment is computed at least `R / (limit - d)` times,
rounded up. The bound adds that up over all segments; it is met where trees fill microbatches without waste.
"""

import numpy as np

from .units import Units


def least_rows(units: Units, max_rows: int, num_microbatches: int = 1) -> int:
    """Rows that every plan without windows computes at least. Linear in units, but for the search of valleys.

    Args:
        units: what is planned; their rows are counted, whatever their cost model.
        max_rows: most rows of a microbatch; a unit above it runs alone.
        num_microbatches: microbatches of the plan, at least: each computes what all units within the limit share.
    """
    total = int(units.rows[units.rows > max_rows].sum())
    members = np.flatnonzero(units.rows <= max_rows).tolist()
    num_microbatches -= len(units) - len(members)
    if not members:
        return total
    rows = units.rows[members]
    cut = np.array([0, *units.neighbour_lcps(members)])
    rest = Units(first=np.arange(len(members) + 1), rows=rows, work=rows, cut=cut, common=rows, cost=units.cost)
    offsets, cuts, alone = rest.row_offsets.tolist(), rest.cuts, rest.unit_rows
    pending = [(0, len(rest), 0)]  # a subtree, and the depth down to which its path is counted
    while pending:
        start, end, above = pending.pop()
        if end - start == 1:
            total += alone[start] - above
            continue
        middle = rest.valley(start, end)
        depth = cuts[middle]
        if depth > above:
            below = offsets[end] - offsets[start] + cuts[start] - depth
            count = -(-below // (max_rows - depth))
            if end - start == len(rest):
                count = max(count, num_microbatches)
            total += (depth - above) * count
        pending += [(start, middle, depth), (middle, end, depth)]
    return total


def least_slot_critical_rows(units: Units, max_rows: int, num_replicas: int) -> int:
    """Sum over slots of the heaviest replica's rows that every plan without windows reaches at least.

    The longest unit runs somewhere, the replicas share all rows evenly at best, and no microbatch holds more rows than
    the sum has: the least sum that all three allow, found by bisection.

    Args:
        units, max_rows: as for [`least_rows`].
        num_replicas: microbatches of a slot.
    """
    low = max(int(units.rows.max()), -(-units.total_rows // num_replicas))
    high = int(units.rows.sum())
    while low < high:
        middle = (low + high) // 2
        if least_rows(units, min(max_rows, middle)) <= middle * num_replicas:
            high = middle
        else:
            low = middle + 1
    return low
