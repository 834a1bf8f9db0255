"""Placement of sharing windows: the ranges of a window take consecutive slots of one replica.

A window that is longer than the step has slots, or that no replica has room for, is divided; each part pays for its
own producer. A heuristic: longest windows first, each on the fullest replica that still holds it.
"""

from bisect import insort
from dataclasses import dataclass

from .draft import Bin, Draft, SharedPrefix
from .units import Units
from .window_partition import Range

SEEK = 0.85  # a divided window is cut at its cheapest cut after this part of a range


@dataclass
class _Chain:
    """Consecutive ranges of one replica; `prefix` is what they share, `None` for a single range."""

    ranges: list[tuple[int, int]]
    prefix: SharedPrefix | None


def place_windows(
    units: Units,
    ranges: list[Range],
    windows: list[SharedPrefix],
    limit: int,
    max_rows: int,
    num_slots: int,
    num_replicas: int,
) -> Draft | None:
    """A draft with every range in a cell of the grid; `None` if the grid is too small.

    Args:
        units: ordered units.
        ranges, windows: from `cheapest_windows`.
        limit: rows that a divided window's ranges are filled to.
        max_rows: most rows charged to a bin.
        num_slots, num_replicas: size of the grid.
    """
    waiting = _chains(ranges, windows)
    free = [num_slots] * num_replicas
    columns: list[list[_Chain]] = [[] for _ in range(num_replicas)]
    singles = [chain for chain in waiting if chain.prefix is None]
    waiting = sorted([chain for chain in waiting if chain.prefix is not None], key=_longest_last)
    while waiting:
        chain = waiting.pop()
        room = [(f, r) for r, f in enumerate(free) if f >= len(chain.ranges)]
        if room:
            room_left, replica = min(room)
            columns[replica].append(chain)
            free[replica] = room_left - len(chain.ranges)
            continue
        replica = max(range(num_replicas), key=lambda r: (free[r], -r))
        if free[replica] == 0:
            return None
        head, rest = _divide(units, chain, free[replica], limit)
        columns[replica].append(head)
        free[replica] -= len(head.ranges)
        for part in rest:
            if part.prefix is None:
                singles.append(part)
            else:
                insort(waiting, part, key=_longest_last)
    return _draft(units, columns, singles, free, max_rows, num_slots)


def _longest_last(chain: _Chain) -> tuple[int, int]:
    return len(chain.ranges), -chain.ranges[0][0]


def _chains(ranges: list[Range], windows: list[SharedPrefix]) -> list[_Chain]:
    chains: list[_Chain] = []
    last = None
    for r in ranges:
        if r.window is not None and r.window == last:
            chains[-1].ranges.append((r.start, r.end))
        else:
            prefix = None if r.window is None else windows[r.window]
            chains.append(_Chain([(r.start, r.end)], prefix))
        last = r.window
    return chains


def _divide(units: Units, chain: _Chain, length: int, limit: int) -> tuple[_Chain, list[_Chain]]:
    """The first `length` ranges as a window of their own, and the rest, which pays for a producer again."""
    tokens = chain.prefix.tokens
    start, end = chain.ranges[0][0], chain.ranges[-1][1]
    kept = max(chain.ranges[:length], _fill(units, start, end, tokens, limit)[:length], key=lambda ranges: ranges[-1])
    rest = [r for r in chain.ranges if r[0] >= kept[-1][1]]
    starts_anew = rest[0][0] == kept[-1][1] and units.range_rows(*rest[0]) <= limit if rest else False
    if not starts_anew:
        rest = _fill(units, kept[-1][1], end, tokens, limit)
    parts = [_Chain(rest, chain.prefix if len(rest) > 1 else None)] if rest else []
    return _Chain(kept, chain.prefix), parts


def _fill(units: Units, start: int, end: int, shared: int, limit: int) -> list[tuple[int, int]]:
    """Ranges of one window, filled in order and cut where it costs least near the limit."""
    offsets, cuts = units.row_offsets.tolist(), units.cut.tolist()
    ranges = []
    while start < end:
        room = limit + (shared if ranges else 0) - cuts[start] + offsets[start]
        least = room - (1 - SEEK) * limit
        stop, best = start + 1, start + 1
        while stop <= end and offsets[stop] <= room:
            if stop == end:
                best = end
            elif best < end and (offsets[best] < least or cuts[stop] <= cuts[best]):
                best = stop
            stop += 1
        ranges.append((start, best))
        start = best
    return ranges


def _draft(units, columns, singles, free, max_rows: int, num_slots: int) -> Draft | None:
    """Bins of all cells: windows, then single ranges by work; a window's end may stay open for refinement."""
    bins: list[Bin] = []
    windows: list[SharedPrefix] = []
    next_slot = [0] * len(columns)
    tallest = [0] * num_slots
    spare = max(0, sum(free) - len(singles))

    def put(slot: int, replica: int, start: int, end: int, window: int | None, produces: bool) -> None:
        bins.append(Bin(list(range(start, end)), slot, replica, window, produces))

    for replica, chains in enumerate(columns):
        chains.sort(key=lambda chain: (-_mean_work(units, chain), chain.ranges[0]))
        for k, chain in enumerate(chains):
            windows.append(chain.prefix)
            for start, end in chain.ranges:
                slot = next_slot[replica]
                produces = start == chain.ranges[0][0]
                put(slot, replica, start, end, len(windows) - 1, produces)
                charged = int(units.range_work(start, end)) - (0 if produces else _prefix_work(units, chain))
                tallest[slot] = max(tallest[slot], charged)
                next_slot[replica] += 1
            if k == len(chains) - 1 and spare > 0 and next_slot[replica] < num_slots:
                put(next_slot[replica], replica, 0, 0, len(windows) - 1, False)
                next_slot[replica] += 1
                spare -= 1
    cells = [(slot, r) for r in range(len(columns)) for slot in range(next_slot[r], num_slots)]
    cells.sort(key=lambda cell: (-tallest[cell[0]], cell))
    singles.sort(key=lambda chain: (-int(units.range_work(*chain.ranges[0])), chain.ranges[0]))
    for k, (slot, replica) in enumerate(cells):
        start, end = singles[k].ranges[0] if k < len(singles) else (0, 0)
        put(slot, replica, start, end, None, False)
    draft = Draft(units, max_rows, len(columns), bins, windows)
    return draft if _join(draft, [chain.ranges[0] for chain in singles[len(cells) :]]) else None


def _join(draft: Draft, ranges: list[tuple[int, int]]) -> bool:
    """Add each range to the lightest bin that has room for it; False if one fits none."""
    lightest = sorted([b for b in draft.bins if b.members or b.window is None], key=lambda b: b.work)
    for start, end in ranges:
        b = _join_one(draft, lightest, start, end)
        if b is None:
            return False
        lightest.remove(b)
        insort(lightest, b, key=lambda b: b.work)
    return True


def _join_one(draft: Draft, lightest: list[Bin], start: int, end: int) -> Bin | None:
    units, run = draft.units, list(range(start, end))
    # no bin shares more with the range than the neighbours of its ends do
    most = max(units.cuts[start], units.cuts[end] if end < len(units) else 0)
    least = int(units.range_rows(start, end)) - most
    for b in lightest:
        if b.rows + least > draft.max_rows:
            continue
        members = sorted(b.members + run)
        rows, work = draft.charge(members, b.window, b.produces)
        if rows <= draft.max_rows:
            b.members, b.rows, b.work = members, rows, work
            return b
    return None


def _prefix_work(units: Units, chain: _Chain) -> int:
    return units.cost.prefix_work(chain.prefix.tokens)


def _mean_work(units: Units, chain: _Chain) -> float:
    works = [int(units.range_work(start, end)) for start, end in chain.ranges]
    return (sum(works) - (len(works) - 1) * _prefix_work(units, chain)) / len(works)
