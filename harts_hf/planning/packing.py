"""Greedy packing of natural pieces into microbatches that need not be contiguous.

Pieces (subtrees that fit the budget) are taken in one of several orders. Each joins the microbatch that a rule prefers
among the owners of its nearest packed neighbours, with which it shares most, and one microbatch chosen by load alone.
A heuristic; it complements the contiguous program where whole small trees have to fill gaps.
"""

from bisect import bisect_left, insort

from .fill import fill
from .units import Units

ORDERS = ("largest first", "in order")
NEIGHBOURS = 3  # bins that are tried on each side: owners of packed neighbours, and by load
MAX_CHOICE = 128  # pieces of evenly spaced ranks that a bin is filled from


def pack(units: Units, pieces: list[tuple[int, int]], max_rows: int, num_bins: int | None, order: str, rule: str):
    """Pack pieces into bins of at most `max_rows` rows.

    Args:
        units: ordered units.
        pieces: ranges of units `[start, end)`, as from `Units.natural_pieces(max_rows)`.
        max_rows: most rows of a bin; a piece above it gets a bin of its own.
        num_bins: bins to fill; `None` opens a bin when nothing fits.
        order: `"largest first"` or `"in order"`, the order in which pieces are taken.
        rule: `"fullest"`: least added rows, then the fullest bin; `"lightest"`: the bin that stays lightest.

    Returns:
        List of bins, each an increasing list of units; `None` if a piece fits no bin and `num_bins` is reached.
    """
    if order == "largest first":
        pieces = sorted(pieces, key=lambda p: (-int(units.range_rows(*p)), p))
    common = units.lcp(0, len(units) - 1) if len(units) > 1 else 0  # every bin shares at least this much
    members: list[list[int]] = [] if num_bins is None or rule == "fullest" else [[] for _ in range(num_bins)]
    rows = [0] * len(members)
    loads = [(0, b) for b in range(len(members))]  # (rows, bin), increasing
    packed: list[tuple[int, int]] = []  # (first unit of a piece, bin), increasing
    for start, end in pieces:
        size = int(units.range_rows(start, end))
        at = bisect_left(packed, (start, -1))
        candidates = [b for _, b in packed[max(0, at - NEIGHBOURS) : at + NEIGHBOURS]]
        if rule == "lightest":
            candidates += [b for _, b in loads[:NEIGHBOURS]]
        else:
            fits = bisect_left(loads, (max_rows - size + common + 1, -1))
            candidates += [b for _, b in loads[max(0, fits - NEIGHBOURS) : fits]]
        best = None
        for b in dict.fromkeys(candidates):
            added = size - _saved_rows(units, members[b], start, end)
            if rows[b] + added > max_rows and rows[b] > 0:
                continue
            rank = (added, -rows[b]) if rule == "fullest" else (rows[b] + added, added)
            if best is None or rank < best[0]:
                best = (rank, b, added)
        if best is None:
            if num_bins is not None and len(members) >= num_bins:
                return None
            members.append([])
            rows.append(0)
            insort(loads, (0, len(rows) - 1))
            best = (None, len(rows) - 1, size)
        _, b, added = best
        del loads[bisect_left(loads, (rows[b], b))]
        rows[b] += added
        insort(loads, (rows[b], b))
        where = bisect_left(members[b], start)
        members[b][where:where] = range(start, end)
        insort(packed, (start, b))
    return [m for m in members if m]


def pack_by_filling(units: Units, pieces: list[tuple[int, int]], max_rows: int) -> list[list[int]]:
    """Pack pieces bin after bin: the largest piece left, then those that fill the bin as far as subset sums reach.

    Pieces are taken to share no more than all units do, so a bin may keep room.

    Args:
        units, pieces, max_rows: as for [`pack`].

    Returns:
        List of bins, each an increasing list of units.
    """
    shared = units.lcp(0, len(units) - 1) if len(units) > 1 else 0
    left = sorted(((int(units.range_rows(*p)) - shared, *p) for p in pieces), key=lambda p: (-p[0], p[1]))
    bins = []
    while left:
        lead, *left = left
        room = max_rows - shared - lead[0]
        first = bisect_left(left, -room, key=lambda p: -p[0])  # the larger ones do not fit
        fitting = range(first, len(left), max(1, -(-(len(left) - first) // MAX_CHOICE)))
        chosen = {fitting[k] for k in fill([left[k][0] for k in fitting], room)}
        bins.append(sorted(u for _, s, e in (lead, *(left[k] for k in chosen)) for u in range(s, e)))
        left = [p for k, p in enumerate(left) if k not in chosen]
    return bins


def _saved_rows(units: Units, members: list[int], start: int, end: int) -> int:
    """Rows that the units `start .. end - 1`, none of which is in `members`, share with them."""
    at = bisect_left(members, start)
    left = units.lcp(members[at - 1], start) if at else 0
    right = units.lcp(end - 1, members[at]) if at < len(members) else 0
    return max(left, right)
