"""Draft: microbatches as sets of units, with their slots and the work they cost, while the planner changes them."""

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np

from .units import Units


@dataclass(eq=False)
class Bin:
    """A microbatch in the making; equal to itself alone.

    Attributes:
        members (`list[int]`): its units, increasing.
        slot (`int`): its slot.
        replica (`int`): its replica.
        window (`int | None`): index into the draft's windows, `None` outside of windows.
        produces (`bool`): first consumer of its window, so the producer is charged to it.
        rows (`int`): rows charged to it: its own, and the producer's if it `produces`.
        work (`int`): work charged to it, likewise.
    """

    members: list[int]
    slot: int = 0
    replica: int = 0
    window: int | None = None
    produces: bool = False
    rows: int = 0
    work: int = 0


@dataclass
class SharedPrefix:
    """A window in the making: the first `tokens` tokens that the units `start .. end - 1` share."""

    start: int
    end: int
    tokens: int


@dataclass
class Draft:
    """All microbatches of a step on a grid of slots and replicas.

    Attributes:
        units (`Units`): what the bins hold.
        max_rows (`int`): most rows charged to a bin; a unit above it has a bin of its own.
        num_replicas (`int`): bins of a slot.
        bins (`list[Bin]`): every unit is in exactly one.
        windows (`list[SharedPrefix]`): what the bins' `window` refers to.
    """

    units: Units
    max_rows: int
    num_replicas: int
    bins: list[Bin]
    windows: list[SharedPrefix] = field(default_factory=list)

    def __post_init__(self):
        """Charge all bins, vectorised over their members; bins of windows hold only units of the window so far."""
        units = self.units
        filled = [b for b in self.bins if b.members]
        members = np.array([u for b in filled for u in b.members])
        starts = np.cumsum([0] + [len(b.members) for b in filled[:-1]])
        shared = np.zeros(len(members), dtype=np.int64)
        shared[1:] = units.lcps(np.minimum(members[:-1], members[1:] - 1), members[1:])
        saved = units.cost.shared_work(shared)
        shared[starts] = saved[starts] = 0
        rows = np.add.reduceat(units.rows[members] - shared, starts).tolist()
        work = np.add.reduceat(units.work[members] - saved, starts).tolist()
        for b, b_rows, b_work in zip(filled, rows, work, strict=True):
            b.rows, b.work = self._in_window(b_rows, b_work, b.window, b.produces)

    @property
    def num_slots(self) -> int:
        """Slots of the grid."""
        return max(b.slot for b in self.bins) + 1

    def charge(self, members: list[int], window: int | None, produces: bool) -> tuple[int, int]:
        """Rows and work of a set of units, with the window's discount and the producer's charge.

        Units that do not start with the shared prefix are computed from their root, apart from the window's.
        """
        if not members:
            return 0, 0
        if window is not None:
            shared = self.windows[window]
            low, high = bisect_left(members, shared.start), bisect_left(members, shared.end)
            if high - low < len(members):
                outside_rows, outside_work = self.charge(members[:low] + members[high:], None, False)
                rows, work = self.charge(members[low:high], window, produces)
                return rows + outside_rows, work + outside_work
        return self._in_window(*self.units.charge(members), window, produces)

    def _in_window(self, rows: int, work: int, window: int | None, produces: bool) -> tuple[int, int]:
        if window is not None:
            tokens = self.windows[window].tokens
            work += self.units.cost.replay_work(tokens)
            if produces:
                work += self.units.cost.producer_work
            else:
                rows -= tokens
                work -= self.units.cost.prefix_work(tokens)
        return rows, work

    def is_one_tree(self, b: Bin, members: list[int]) -> bool:
        """Whether units in the bin are computed as one tree: it is plain, or they all start with the shared prefix."""
        if b.window is None:
            return True
        window = self.windows[b.window]
        return all(window.start <= u < window.end for u in members)

    def part_with(self, b: Bin, run: list[int]) -> list[int] | None:
        """Members of a bin that are computed as one tree with a run of units; `None` if parts of the run differ."""
        if b.window is None:
            return b.members
        window = self.windows[b.window]
        low, high = bisect_left(b.members, window.start), bisect_left(b.members, window.end)
        if window.start <= run[0] and run[-1] < window.end:
            return b.members[low:high]
        if run[-1] < window.start or window.end <= run[0]:
            return b.members[:low] + b.members[high:]
        return None

    def may_hold(self, b: Bin, members: list[int]) -> bool:
        """Whether a bin of a window keeps a member that starts with the shared prefix; plain bins hold anything."""
        if b.window is None:
            return True
        window = self.windows[b.window]
        at = bisect_left(members, window.start)
        return at < len(members) and members[at] < window.end

    @property
    def total_work(self) -> int:
        """Work of all bins together."""
        return sum(b.work for b in self.bins)

    def objectives(self) -> tuple[int, int, int]:
        """Total work, sum over slots of the heaviest bin, largest cumulative work of a replica."""
        heaviest = [0] * self.num_slots
        replica = [0] * self.num_replicas
        for b in self.bins:
            heaviest[b.slot] = max(heaviest[b.slot], b.work)
            replica[b.replica] += b.work
        return sum(replica), sum(heaviest), max(replica)
