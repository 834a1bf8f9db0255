"""Local search on the placement of a draft: the same microbatches, in other slots and on other replicas.

A heuristic. A block is a window's consecutive bins, or one bin outside of windows; each replica's column is a sequence
of blocks. Blocks of one length change places, neighbours in a column change order, and consumers of a window change
order, while the sum over slots of the heaviest bin falls.
"""

from .draft import Bin, Draft

MAX_BLOCKS = 500  # with more blocks, only neighbours and consumers change order
MAX_PASSES = 4


def reseat(draft: Draft) -> None:
    """Improve the placement in place; membership and windows stay, which consumer comes first may change."""
    seating = _Seating(draft)
    for _ in range(MAX_PASSES):
        if not seating.improve():
            break


class _Seating:
    def __init__(self, draft: Draft):
        self.draft = draft
        self.columns: list[list[list[Bin]]] = [[] for _ in range(draft.num_replicas)]
        self.work = [[0] * draft.num_replicas for _ in range(draft.num_slots)]
        for b in sorted(draft.bins, key=lambda b: (b.replica, b.slot)):
            column = self.columns[b.replica]
            if b.window is not None and column and column[-1][-1].window == b.window:
                column[-1].append(b)
            else:
                column.append([b])
            self.work[b.slot][b.replica] = b.work
        self.heaviest = [max(row) for row in self.work]

    def improve(self) -> bool:
        improved = False
        for column in self.columns:
            for k in range(len(column) - 1):
                improved |= self._turn(column, k)
            for block in column:
                improved |= self._reorder(block)
        blocks = sum(map(len, self.columns))
        if blocks <= MAX_BLOCKS:
            for a in range(len(self.columns)):
                for b in range(a, len(self.columns)):
                    improved |= self._exchange(self.columns[a], self.columns[b])
        return improved

    def _try(self, seats: list[tuple[Bin, int, int]]) -> bool:
        """Seat bins at (slot, replica), among themselves, if the sum of the heaviest falls."""
        slots = {slot for _, slot, _ in seats}
        for b, slot, replica in seats:
            self.work[slot][replica] = b.work
        if sum([max(self.work[slot]) - self.heaviest[slot] for slot in slots]) < 0:
            for b, slot, replica in seats:
                b.slot, b.replica = slot, replica
            for slot in slots:
                self.heaviest[slot] = max(self.work[slot])
            return True
        for b, _, _ in seats:
            self.work[b.slot][b.replica] = b.work
        return False

    def _turn(self, column: list[list[Bin]], k: int) -> bool:
        first, second = column[k], column[k + 1]
        start, replica = first[0].slot, first[0].replica
        if self._try([(b, start + i, replica) for i, b in enumerate(second + first)]):
            column[k], column[k + 1] = second, first
            return True
        return False

    def _exchange(self, column: list[list[Bin]], other: list[list[Bin]]) -> bool:
        improved = False
        for i in range(len(column)):
            for j in range(len(other)):
                a, b = column[i], other[j]
                if len(a) != len(b) or a[0].slot == b[0].slot or not self._may_gain(a, b):
                    continue
                there = [(x.slot, x.replica) for x in b]
                here = [(x.slot, x.replica) for x in a]
                seats = [(x, *seat) for x, seat in zip(a + b, there + here, strict=True)]
                if self._try(seats):
                    column[i], other[j] = b, a
                    improved = True
        return improved

    def _may_gain(self, block: list[Bin], other: list[Bin]) -> bool:
        """Whether a slot's heaviest bin would make way for a lighter one: no exchange gains without."""
        heaviest = self.heaviest
        for a, b in zip(block, other, strict=True):
            if (a.work > b.work and a.work == heaviest[a.slot]) or (b.work > a.work and b.work == heaviest[b.slot]):
                return True
        return False

    def _reorder(self, block: list[Bin]) -> bool:
        """Two consumers of a window change slots; the producer's charge stays in the first slot."""
        improved = False
        for i in range(len(block)):
            for j in range(i + 1, len(block)):
                a, b = block[i], block[j]
                if not (a.members and b.members):
                    continue  # empty consumers stay at the end, so that the others are consecutive
                if a.produces:
                    improved |= self._lead(block, i, j)
                elif self._try([(a, b.slot, b.replica), (b, a.slot, a.replica)]):
                    block[i], block[j] = b, a
                    improved = True
        return improved

    def _lead(self, block: list[Bin], i: int, j: int) -> bool:
        """Let consumer `j` run first, and carry the producer's charge, instead of consumer `i`."""
        a, b = block[i], block[j]
        rows, work = self.draft.charge(b.members, b.window, True)
        if rows > self.draft.max_rows:
            return False
        before = a.rows, a.work, b.rows, b.work
        b.rows, b.work, b.produces = rows, work, True
        a.rows, a.work = self.draft.charge(a.members, a.window, False)
        a.produces = False
        if self._try([(a, b.slot, b.replica), (b, a.slot, a.replica)]):
            block[i], block[j] = b, a
            return True
        a.rows, a.work, b.rows, b.work = before
        a.produces, b.produces = True, False
        for c in (a, b):
            self.work[c.slot][c.replica] = c.work
        return False
