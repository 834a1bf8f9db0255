"""Seating: where the bins and the units of a draft are, kept up to date by a local search that moves units."""

from .draft import Bin, Draft


class Seating:
    """Bins by slot, bins by unit, and the heaviest work of each slot.

    Attributes:
        slots (`list[list[Bin]]`): bins of each slot.
        owner (`list[Bin]`): bin that holds each unit.
        heaviest (`list[int]`): work of each slot's heaviest bin.
    """

    def __init__(self, draft: Draft):
        self.slots: list[list[Bin]] = [[] for _ in range(draft.num_slots)]
        self.owner: list[Bin] = [draft.bins[0]] * len(draft.units)
        for b in draft.bins:
            self.slots[b.slot].append(b)
            for u in b.members:
                self.owner[u] = b
        self.heaviest = [max(b.work for b in slot) for slot in self.slots]

    def put(self, changes: list[tuple[Bin, list[int], int, int]]) -> None:
        """Give bins new members, with their rows and work; together the bins keep the units that they had."""
        for b, members, rows, work in changes:
            b.members, b.rows, b.work = members, rows, work
            for u in members:
                self.owner[u] = b
        for b, *_ in changes:
            self.heaviest[b.slot] = max(c.work for c in self.slots[b.slot])
