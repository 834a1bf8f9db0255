"""Local search on packings: a few bins are packed again, by the exact program in a new order or by exact filling.

A heuristic. A step takes a few bins, half of the time such as hold neighbours, and packs their units again in one of
two ways. Children of a fork may stand in any order, and each depth-first order has its own contiguous partitions: one
way partitions a random order at least cost. The other parts the units into subtrees and fills one bin after the other
as far as subset sums reach. A result is kept if the total work, each bin counted as `BIN_WORK` more, does not grow and
at equal work the sum of squared rows does not fall: room gathers in few bins, until one can go. With `even` the sum
does not grow instead, and bins are filled to even shares. Random choices come from a fixed seed.
"""

from random import Random

import numpy as np

from .fill import fill
from .partition import cheapest_partition, first_starts
from .subtrees import piece_sums, random_order, random_pieces
from .units import Units

SEED = 0
STEP_OVERHEAD = 20  # a step costs as much as packing this many units
STEPS_PER_SEAT = 50  # units packed again for each unit and bin, at most: a small step is searched through sooner
BIN_WORK = 0.02  # of the budget: what a bin is taken to cost in addition
BINS_TAKEN = (3, 4, 6, 8, 10)
MAX_PIECES = 32  # subtrees that a filling chooses from; more of them are joined to neighbours
FILLED_SHARE = 0.25  # steps that fill; the others partition
EVEN_FILLED_SHARE = 0.7  # the same with `even`: only filling aims at even shares
LED_SHARE = 0.7  # fillings whose bins each start with the largest subtree left


def repack(
    units: Units, bins: list[list[int]], max_rows: int, unit_steps: int, even: bool = False, bound_rows: int = 0
) -> list[list[int]]:
    """Bins of no more total work and number, weighed together, than the given ones.

    Args:
        units: ordered units.
        bins: increasing lists of units.
        max_rows: most rows of a bin; a unit above it stays a bin of its own.
        unit_steps: most units packed again over all steps, which bounds the time whatever the bins hold.
        even: let the sum of squared rows fall instead of grow, so that bins come closer to each other.
        bound_rows: a lower bound of all bins' rows; the search ends when as few bins as hold it have no more rows.
    """
    search = _Repacking(units, max_rows, bins, even)
    unit_steps = min(unit_steps, STEPS_PER_SEAT * len(units) * len(bins))
    least_bins = max(2, -(-bound_rows // max_rows) - len(search.fixed))
    while len(search.bins) > 1 and unit_steps > 0:
        repacked, gained = search.step()
        unit_steps -= repacked + STEP_OVERHEAD
        if gained and len(search.bins) <= least_bins and search.total_rows <= bound_rows:
            break
    return search.fixed + search.bins


class _Repacking:
    def __init__(self, units: Units, max_rows: int, bins: list[list[int]], even: bool):
        self.units, self.max_rows, self.even = units, max_rows, even
        self.filled_share = EVEN_FILLED_SHARE if even else FILLED_SHARE
        self.random = Random(SEED)
        self.bin_work = round(BIN_WORK * max_rows)
        self.fixed = [members for members in bins if units.unit_rows[members[-1]] > max_rows]
        self.bins = [members for members in bins if units.unit_rows[members[-1]] <= max_rows]
        self.owner = {u: b for b, members in enumerate(self.bins) for u in members}
        self.values = [self._value(members) for members in self.bins]

    def step(self) -> tuple[int, bool]:
        """Pack a few bins again; returns the number of units packed, and whether the work or the squares gained."""
        taken = self._choose()
        if len(taken) == 1:
            return 0, False
        members = sorted([u for b in taken for u in self.bins[b]])
        cuts = [0, *self.units.neighbour_lcps(members)]
        pack = self._filled if self.random.random() < self.filled_share else self._partitioned
        packed = pack(members, cuts, len(taken))
        if packed is None:
            return len(members), False
        values = [self._value(p) for p in packed]
        before = [self.values[b] for b in taken]
        loss = (
            sum(v[0] for v in values) - sum(v[0] for v in before),
            sum(v[1] for v in before) - sum(v[1] for v in values),
        )
        if loss <= (0, 0):
            self._replace(taken, packed, values)
        return len(members), loss < (0, 0)

    @property
    def total_rows(self) -> int:
        """Rows of all bins."""
        return sum(self.units.charge(members)[0] for members in (*self.fixed, *self.bins))

    def _choose(self) -> list[int]:
        """A random bin and a few more: owners of its members' neighbours, or any."""
        draw, bins = self.random.random, self.bins  # randrange and choice take five times as long
        first = int(draw() * len(bins))
        taken = [first]
        for _ in range(BINS_TAKEN[int(draw() * len(BINS_TAKEN))] - 1):
            if draw() < 0.5:
                unit = bins[first][int(draw() * len(bins[first]))]
                other = self.owner.get(unit + (1 if draw() < 0.5 else -1), first)
            else:
                other = int(draw() * len(bins))
            if other not in taken:
                taken.append(other)
        return taken

    def _value(self, members: list[int]) -> tuple[int, int]:
        """Work of a bin with `bin_work`, and its rows squared."""
        rows, work = self.units.charge(members)
        squares = rows * rows
        return work + self.bin_work, -squares if self.even else squares

    def _replace(self, taken: list[int], packed: list[list[int]], values: list[tuple[int, int]]) -> None:
        """Bins `taken` become `packed`; the others keep their order up to which of them fill the holes."""
        for b in sorted(taken, reverse=True):
            last, last_value = self.bins.pop(), self.values.pop()
            if b < len(self.bins):
                self.bins[b], self.values[b] = last, last_value
                for u in last:
                    self.owner[u] = b
        for members, value in zip(packed, values, strict=True):
            for u in members:
                self.owner[u] = len(self.bins)
            self.bins.append(members)
            self.values.append(value)

    def _filled(self, members: list[int], cuts: list[int], num_bins: int) -> list[list[int]] | None:
        """Subtrees of a random division, bin after bin; `None` if a subtree does not fit."""
        random, unit_rows = self.random, self.units.unit_rows
        pieces = random_pieces(cuts, MAX_PIECES, random)
        shared = min(cuts[1:])
        room = self.max_rows - shared  # a bin holds what all units share, and pieces beyond it
        sizes = [size - shared for size in piece_sums([unit_rows[u] for u in members], cuts, pieces)]
        if max(sizes) > room:
            return None
        led = random.random() < LED_SHARE
        packed = []
        while pieces:
            target = room
            if self.even and len(packed) < num_bins - 1:
                target = min(room, sum(sizes) // (num_bins - len(packed)))
            if sum(sizes) <= target:
                chosen = set(range(len(pieces)))
            elif led or max(sizes) > target:
                lead = sizes.index(max(sizes))
                others = [*sizes[:lead], room + 1, *sizes[lead + 1 :]]
                chosen = {lead, *fill(others, target - sizes[lead])}
            else:
                chosen = set(fill(sizes, target))
            packed.append(sorted([u for k in chosen for u in members[pieces[k][0] : pieces[k][1]]]))
            sizes = [size for k, size in enumerate(sizes) if k not in chosen]
            pieces = [piece for k, piece in enumerate(pieces) if k not in chosen]
        return packed

    def _partitioned(self, members: list[int], cuts: list[int], num_bins: int) -> list[list[int]]:
        """The cheapest partition of a random depth-first order."""
        units = self.units
        order, between = random_order(cuts, self.random)
        order = [members[k] for k in order]
        rows, cut = units.rows[order], np.array(between)
        starts = cheapest_partition(units.cost.shared_work(cut), first_starts(rows, rows - cut, self.max_rows))
        return [sorted(order[s:e]) for s, e in zip(starts, [*starts[1:], len(order)], strict=True)]
