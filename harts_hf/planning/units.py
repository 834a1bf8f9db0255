"""Units: what the planner moves around, trajectories in lexicographic order with nested prefixes merged.

A trajectory that is a prefix of its right neighbour adds no row to it, so both are one unit. Units keep the formula of
trajectories: a set of units in order holds the sum of their rows minus the sum of the LCPs of neighbours, and the LCP
of two units is the least cut between them. A run of units is a unit again.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harts_hf.tree import PrefixTree

from .cost import CostModel


@dataclass(frozen=True, eq=False)
class Units:
    """Ordered units of a step.

    Attributes:
        first (`np.ndarray` of shape `[U + 1]`, int64): unit `u` holds the sorted trajectories `first[u] .. first[u +
            1]`.
        rows (`np.ndarray` of shape `[U]`, int64): rows of each unit alone.
        work (`np.ndarray` of shape `[U]`, int64): work of each unit alone, in row equivalents of `cost`.
        cut (`np.ndarray` of shape `[U]`, int64): LCP with the left neighbour, in tokens; 0 for the first.
        common (`np.ndarray` of shape `[U]`, int64): tokens that all trajectories of a unit share, up to the one that
            ends last: its rows for a chain of nested prefixes, the least LCP inside for a run that was made a unit.
        cost (`CostModel`): what `work` counts.
    """

    first: np.ndarray
    rows: np.ndarray
    work: np.ndarray
    cut: np.ndarray
    common: np.ndarray
    cost: CostModel

    @classmethod
    def from_tree(cls, tree: PrefixTree, cost: CostModel) -> "Units":
        """One unit for every trajectory that is no prefix of its right neighbour, with its own prefixes."""
        lengths = tree.lengths[tree.sorted_order]
        is_last = np.ones(len(lengths), dtype=bool)
        is_last[:-1] = tree.sorted_lcp[1:] < lengths[:-1]
        ends = np.flatnonzero(is_last)
        first = np.concatenate([[0], ends + 1])
        rows = lengths[ends]
        cut = tree.sorted_lcp[first[:-1]]
        return cls(first=first, rows=rows, work=cost.prefix_work(rows), cut=cut, common=rows, cost=cost)

    def __len__(self) -> int:
        return len(self.rows)

    @cached_property
    def cut_work(self) -> np.ndarray:
        """`[U]`, int64: work of starting a microbatch at each unit instead of joining its left neighbour."""
        return self.cost.shared_work(self.cut)

    @cached_property
    def added_rows(self) -> np.ndarray:
        """`[U]`, int64: rows that each unit adds to its left neighbour."""
        return self.rows - self.cut

    @cached_property
    def row_offsets(self) -> np.ndarray:
        """`[U + 1]`, int64: cumulative `added_rows`."""
        return np.concatenate([[0], np.cumsum(self.added_rows)])

    @cached_property
    def work_offsets(self) -> np.ndarray:
        """`[U + 1]`, int64: cumulative work that each unit adds to its left neighbour."""
        return np.concatenate([[0], np.cumsum(self.work - self.cut_work)])

    @cached_property
    def unit_rows(self) -> list[int]:
        """`rows` as Python ints, for code that looks at single units."""
        return self.rows.tolist()

    @cached_property
    def unit_work(self) -> list[int]:
        """`work` as Python ints."""
        return self.work.tolist()

    @property
    def total_rows(self) -> int:
        """Rows of all units in one microbatch."""
        return int(self.row_offsets[-1])

    def range_rows(self, start, end):
        """Rows of the units `start .. end - 1` in one microbatch; ints or arrays."""
        return self.row_offsets[end] - self.row_offsets[start] + self.cut[start]

    def range_work(self, start, end):
        """Work of the units `start .. end - 1` in one microbatch; ints or arrays."""
        return self.work_offsets[end] - self.work_offsets[start] + self.cut_work[start]

    @cached_property
    def _least_cut(self) -> list[np.ndarray]:
        """Sparse table: entry `[k][i]` is the index of the least cut of `2**k` from `i`, the leftmost of equals."""
        table = [np.arange(len(self))]
        width = 1
        while 2 * width <= len(self):
            left, right = table[-1][:-width], table[-1][width:]
            table.append(np.where(self.cut[left] <= self.cut[right], left, right))
            width *= 2
        return table

    @cached_property
    def _least_cut_lists(self) -> list[list[int]]:
        return [level.tolist() for level in self._least_cut]

    @cached_property
    def cuts(self) -> list[int]:
        """`cut` as Python ints."""
        return self.cut.tolist()

    def valley(self, start: int, end: int) -> int:
        """The unit in `start + 1 .. end - 1` with the least LCP to its left neighbour, the leftmost of equals."""
        level = (end - start - 1).bit_length() - 1
        table, cuts = self._least_cut_lists[level], self.cuts
        left, right = table[start + 1], table[end - (1 << level)]
        return left if cuts[left] <= cuts[right] else right

    def lcp(self, left: int, right: int) -> int:
        """Tokens shared by units `left < right`."""
        if right == left + 1:
            return self.cuts[right]
        return self.cuts[self.valley(left, right + 1)]

    def neighbour_lcps(self, members: list[int]) -> list[int]:
        """LCP of each of the increasing units but the first with the one before it."""
        cuts, lcp = self.cuts, self.lcp
        return [cuts[b] if b == a + 1 else lcp(a, b) for a, b in zip(members, members[1:], strict=False)]

    def charge(self, members: list[int]) -> tuple[int, int]:
        """Rows and work of increasing units that are computed as one tree from their root."""
        lcps = self.neighbour_lcps(members)
        rows = work = sum([self.unit_rows[u] for u in members]) - sum(lcps)
        if not self.cost.counts_rows:
            work = sum([self.unit_work[u] for u in members]) - sum(map(self.cost.shared_work, lcps))
        return rows, work

    def lcps(self, left: np.ndarray, right: np.ndarray) -> np.ndarray:
        """`lcp` of arrays of units."""
        levels = np.frexp(right - left)[1] - 1  # floor(log2)
        shared = np.empty(len(left), dtype=np.int64)
        for level in np.unique(levels).tolist():
            at = np.flatnonzero(levels == level)
            table = self._least_cut[level]
            shared[at] = np.minimum(self.cut[table[left[at] + 1]], self.cut[table[right[at] + 1 - (1 << level)]])
        return shared

    def natural_pieces(self, max_rows: int) -> list[tuple[int, int]]:
        """The natural partition: ranges split at their LCP valley, recursively, until they hold at most `max_rows`.

        Returns:
            Ranges `[start, end)` in order; a single unit above `max_rows` is one of its own.
        """
        pieces = []
        pending = [(0, len(self))]
        while pending:
            start, end = pending.pop()
            if end - start == 1 or self.range_rows(start, end) <= max_rows:
                pieces.append((start, end))
                continue
            middle = self.valley(start, end)
            pending.append((middle, end))
            pending.append((start, middle))
        return pieces

    def merged(self, pieces: list[tuple[int, int]]) -> "Units":
        """Units of which each is one of the ranges, which cover all units in order."""
        starts = np.array([start for start, _ in pieces], dtype=np.int64)
        ends = np.append(starts[1:], len(self))
        inside = np.minimum(self.common, self.cut)
        inside[starts] = self.common[starts]
        return Units(
            first=np.append(self.first[starts], self.first[-1]),
            rows=self.range_rows(starts, ends),
            work=self.range_work(starts, ends),
            cut=self.cut[starts],
            common=np.minimum.reduceat(inside, starts),
            cost=self.cost,
        )

    def coarsened(self, max_units: int, max_rows: int) -> "Units":
        """About `max_units` units or fewer: neighbouring units joined while they add few rows to what stands before.

        Args:
            max_units: the rows that a joined unit may add are `total_rows / max_units`; fewer units return unchanged.
            max_rows: most rows of a joined unit.
        """
        if len(self) <= max_units:
            return self
        grain = self.total_rows // max_units
        offsets, cuts = self.row_offsets.tolist(), self.cuts
        pieces = [(0, 1)]
        for unit in range(1, len(self)):
            start = pieces[-1][0]
            added = offsets[unit + 1] - offsets[start]
            # a joined unit is no part of two subtrees: its inner cuts are no lower than the cut before it
            if added <= grain and added + cuts[start] <= max_rows and cuts[unit] >= cuts[start]:
                pieces[-1] = (start, unit + 1)
            else:
                pieces.append((unit, unit + 1))
        return self.merged(pieces)
