"""Random changes of the sharing windows of a draft, for local search: what some bins would hold and share.

A bin joins the window next to it in its column, leaves its window, founds one with a neighbour, or its window gets
another prefix. A window's bins stay consecutive and the first of them produces.
"""

from bisect import bisect_left
from random import Random

from .draft import Bin, Draft, SharedPrefix
from .units import Units

Seat = tuple[Bin, list[int], int | None, bool]  # a bin, and its members, window and producing as they would be


def rewindow(draft: Draft, cells: dict[tuple[int, int], Bin], b: Bin, max_prefix: int, random: Random) -> list[Seat]:
    """Seats after a random change around a bin; empty if the change that was drawn does not apply.

    Args:
        draft: its `windows` may grow by one that nothing refers to, if the change is not taken.
        cells: bins by (slot, replica).
        b: a bin that holds units.
        max_prefix: longest prefix of a new window, in rows.
        random: source of the choices.
    """
    draw = random.random
    chain = _chain(cells, b)
    way = draw()
    if b.window is not None and way < 0.4:
        return _with_prefix(draft, chain, max_prefix, random)
    at = next(k for k, c in enumerate(chain) if c is b)
    if 0 < at < len(chain) - 1:
        return []
    left_behind = chain[:at] + chain[at + 1 :]
    if left_behind and not left_behind[0].members:
        return []  # a window's first bin produces, so it is not empty
    seats = _seats(left_behind, b.window)
    if b.window is not None and way < 0.6:
        return [*seats, (b, b.members, None, False)]
    step = 1 if at == len(chain) - 1 and (at > 0 or draw() < 0.5) else -1
    other = cells.get((b.slot + step, b.replica))
    if other is None or not other.members:
        return []
    joined = _chain(cells, other)
    if other.window is not None and draw() < 0.5:
        joined = [b, *joined] if step > 0 else [*joined, b]
        return seats + _seats(joined, other.window)
    if len(joined) > 1:
        return []
    return seats + _with_prefix(draft, [b, other] if step > 0 else [other, b], max_prefix, random)


def _chain(cells: dict[tuple[int, int], Bin], b: Bin) -> list[Bin]:
    """The bins of the bin's window, by slot; the bin alone if it has none."""
    if b.window is None:
        return [b]
    chain, slot = [], b.slot
    while (c := cells.get((slot - 1, b.replica))) is not None and c.window == b.window:
        slot -= 1
    while (c := cells.get((slot, b.replica))) is not None and c.window == b.window:
        chain.append(c)
        slot += 1
    return chain


def _seats(chain: list[Bin], window: int | None) -> list[Seat]:
    return [(b, b.members, window, window is not None and k == 0) for k, b in enumerate(chain)]


def _with_prefix(draft: Draft, chain: list[Bin], max_prefix: int, random: Random) -> list[Seat]:
    """The chain as a window whose prefix two members of different bins share."""
    filled = [b for b in chain if b.members]
    if len(filled) < 2:
        return []
    draw = random.random
    first = int(draw() * len(filled))
    second = (first + 1 + int(draw() * (len(filled) - 1))) % len(filled)
    one, other = (filled[k].members[int(draw() * len(filled[k].members))] for k in (first, second))
    low, high = min(one, other), max(one, other)
    units = draft.units
    tokens = min(units.lcp(low, high), int(units.common[low]), int(units.common[high]), max_prefix)
    if tokens < 1:
        return []
    prefix = prefix_of(units, low, tokens)
    draft.windows.append(prefix)
    return _seats(chain, len(draft.windows) - 1)


def prefix_of(units: Units, unit: int, tokens: int) -> SharedPrefix:
    """The prefix that a unit's first `tokens` tokens are, shared by all units that start with them."""
    lcp = units.lcp
    start = bisect_left(range(unit), True, key=lambda u: lcp(u, unit) >= tokens)
    end = bisect_left(range(len(units)), True, lo=unit + 1, key=lambda u: lcp(unit, u) < tokens)
    start += int(units.common[start]) < tokens  # a joined unit may begin before the subtree
    return SharedPrefix(start, end, tokens)
