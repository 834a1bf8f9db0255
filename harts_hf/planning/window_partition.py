"""Cheapest partition of ordered units into ranges and sharing windows: an exact dynamic program over one level.

A window is a run of consecutive ranges whose units share a prefix of `P` rows. Its first range is charged as it would
be without a window, which pays for the producer's rows, and `CostModel.producer`; each later range is charged `P` rows
less. So cutting inside a window costs the neighbours' LCP minus `P`, and a later range may span `P` rows more.

Candidate space: every partition into contiguous ranges within the limit, with every choice of disjoint windows whose
prefix is a fork of the tree whose subtree exceeds the limit. Forks that are hardly deeper than one kept above them are
left out (`MIN_GAIN`), windows do not nest. Cost: units times kept forks above a unit.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from .draft import SharedPrefix
from .partition import first_starts
from .units import Units

MIN_GAIN = 32  # a fork is kept if it is deeper than the one above by limit / MIN_GAIN rows


@dataclass(frozen=True)
class Range:
    """Units `start .. end - 1`; `window` is an index into the windows of the partition, or `None`."""

    start: int
    end: int
    window: int | None


def shared_prefixes(units: Units, limit: int, max_prefix: int) -> list[SharedPrefix]:
    """Prefixes that a window may share: forks whose subtree exceeds `limit`, outer before inner.

    Args:
        units: ordered units.
        limit: most rows of a range; a smaller subtree fits into one range and needs no window.
        max_prefix: most rows of a prefix that the window memory allows.
    """
    if max_prefix < 1:
        return []
    prefixes: list[SharedPrefix] = []
    pending = [(0, len(units), 0)]
    while pending:
        start, end, above = pending.pop()
        if end - start == 1 or units.range_rows(start, end) <= limit:
            continue
        middle = units.valley(start, end)
        tokens = min(units.lcp(start, end - 1), int(units.common[start:end].min()), max_prefix)
        if tokens >= max(1, above + limit // MIN_GAIN):
            prefixes.append(SharedPrefix(start, end, tokens))
            above = tokens
        pending.append((middle, end, above))
        pending.append((start, middle, above))
    return prefixes


def cheapest_windows(
    units: Units, limit: int, prefixes: list[SharedPrefix], penalty: int = 0
) -> tuple[list[Range], list[SharedPrefix]]:
    """Ranges in order, and the windows that they refer to: least work plus penalties, then fewest ranges.

    Args:
        units: ordered units.
        limit: most rows charged to a range; a single unit above it is a range of its own.
        prefixes: candidates from [`shared_prefixes`].
        penalty: work that each range is taken to cost in addition; a larger one gives fewer ranges.
    """
    num_units = len(units)
    scale = num_units + 1
    step = penalty * scale + 1
    cut = (units.cut_work * scale + step).tolist()
    cut[0] = step
    plain_window = first_starts(units.rows, units.added_rows, limit).tolist()
    states = [_Open(units, prefix, limit, scale, step) for prefix in prefixes]
    opens: list[list[_Open]] = [[] for _ in range(num_units + 1)]
    for state in states:
        opens[state.start + 1].append(state)

    best = [0] * (num_units + 1)
    closed: list[tuple[int, _Open | None]] = [(0, None)] * (num_units + 1)  # start of the last range, its open window
    plain_starts: list[int] = []
    plain_values: list[int] = []
    head = 0
    active: list[_Open] = []
    for end in range(1, num_units + 1):
        value = best[end - 1] + cut[end - 1]
        while len(plain_values) > head and plain_values[-1] > value:
            plain_values.pop()
            plain_starts.pop()
        plain_values.append(value)
        plain_starts.append(end - 1)
        while plain_starts[head] < plain_window[end]:
            head += 1
        best[end] = plain_values[head]
        closed[end] = (plain_starts[head], None)
        active = [state for state in active if state.end >= end] + opens[end]
        for state in active:
            at = bisect_left(plain_starts, state.start, head)
            inner = state.extend(end, plain_values[at], plain_starts[at])
            if inner is not None and inner[0] < best[end]:
                best[end] = inner[0]
                closed[end] = (inner[1], state)
    return _trace(closed, num_units)


class _Open:
    """Best partitions that end with a range of one open window, by the end of that range."""

    def __init__(self, units: Units, prefix: SharedPrefix, limit: int, scale: int, step: int):
        cost = units.cost
        self.start, self.end, self.tokens = prefix.start, prefix.end, prefix.tokens
        replay = cost.replay_work(prefix.tokens)
        self.entry = (replay + cost.producer_work) * scale
        inside = slice(prefix.start, prefix.end)
        discount = cost.prefix_work(prefix.tokens) - replay
        self.cut = ((units.cut_work[inside] - discount) * scale + step).tolist()
        window = first_starts(units.rows[inside], units.added_rows[inside], limit + prefix.tokens)
        self.window = (window + prefix.start).tolist()
        self.value: dict[int, int] = {}
        self.origin: dict[int, tuple[int, bool]] = {}  # start of the range, whether it is the window's first
        self.starts: list[int] = []
        self.values: list[int] = []
        self.head = 0

    def extend(self, end: int, first_value: int, first_start: int) -> tuple[int, int] | None:
        """Add the ranges that end at `end`; returns (value, start) of the best one that is not the first."""
        later = None
        start = end - 1
        if start > self.start:
            value = self.value[start] + self.cut[start - self.start]
            while len(self.values) > self.head and self.values[-1] > value:
                self.values.pop()
                self.starts.pop()
            self.values.append(value)
            self.starts.append(start)
            while self.starts[self.head] < self.window[end - self.start]:
                self.head += 1
            later = (self.values[self.head], self.starts[self.head])
        if later is not None and later[0] < first_value + self.entry:
            self.value[end] = later[0]
            self.origin[end] = (later[1], False)
        else:
            self.value[end] = first_value + self.entry
            self.origin[end] = (first_start, True)
        return later


def _trace(closed: list[tuple[int, _Open | None]], end: int) -> tuple[list[Range], list[SharedPrefix]]:
    ranges: list[Range] = []
    windows: list[SharedPrefix] = []
    while end > 0:
        start, state = closed[end]
        if state is None:
            ranges.append(Range(start, end, None))
            end = start
            continue
        windows.append(SharedPrefix(state.start, state.end, state.tokens))
        ranges.append(Range(start, end, len(windows) - 1))
        is_first = False
        while not is_first:
            end = start
            start, is_first = state.origin[end]
            ranges.append(Range(start, end, len(windows) - 1))
        end = start
    return ranges[::-1], windows


def partition_work(units: Units, ranges: list[Range], windows: list[SharedPrefix]) -> int:
    """Work of ranges with their windows, the producers charged once."""
    starts = np.array([r.start for r in ranges])
    ends = np.array([r.end for r in ranges])
    total = int(units.range_work(starts, ends).sum())
    for k, window in enumerate(windows):
        consumers = sum(r.window == k for r in ranges)
        total -= (consumers - 1) * units.cost.prefix_work(window.tokens)
        total += consumers * units.cost.replay_work(window.tokens) + units.cost.producer_work
    return total
