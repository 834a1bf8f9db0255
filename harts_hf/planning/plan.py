"""StepPlan: which trajectories run together, where and in what order, in one optimizer step. Data only, numpy-free."""

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class Microbatch:
    """Whole trajectories that run in one forward and backward.

    Attributes:
        trajectories (`tuple[int, ...]`): indices into the step's trajectories, in lexicographic order of their tokens.
        rows (`int`): compact work, the number of rows of the trajectories' prefix tree; without the rows of the shared
            prefix if `window` is set.
        window (`int | None`): index into the plan's `windows` if the microbatch starts from that window's boundary. At
            least one of its trajectories then starts with the shared prefix; those that end inside of it add no row.
            The others start at their root: `rows` counts all of their rows, also what they have in common with the
            shared prefix, since a boundary serves its end alone.
    """

    trajectories: tuple[int, ...]
    rows: int
    window: int | None = None


@dataclass(frozen=True)
class Window:
    """A sharing window: a prefix that one producer computes for consecutive microbatches of one replica.

    The producer runs before the first consumer, in the same slot, and its rows are charged there. A window inside
    another one has a producer that starts from the outer window's boundary and computes the rest of its prefix.

    Attributes:
        trajectory (`int`): a trajectory that starts with the shared prefix.
        prefix_tokens (`int`): length of the prefix, in tokens from the trajectory's start.
        replica (`int`): where producer and consumers run.
        consumers (`tuple[int, ...]`): consecutive slots of the consumers, which are `slots[slot][replica]`: their
            `window` is this one, or one inside of it.
        parent (`int | None`): index of the window that this one lies in; its prefix is shorter, its consumers are
            these and maybe others.
    """

    trajectory: int
    prefix_tokens: int
    replica: int
    consumers: tuple[int, ...]
    parent: int | None = None


@dataclass(frozen=True)
class StepPlan:
    """The microbatches of one optimizer step.

    Attributes:
        slots (`tuple[tuple[Microbatch | None, ...], ...]`): `slots[slot][replica]`; `None` where a replica has nothing
            to run in a slot.
        num_tokens (`int`): expanded tokens S of the step.
        windows (`tuple[Window, ...]`): prefixes that are shared across microbatches; empty if planned without windows.
        objective (`str`): what the plan was optimised for first, one of `OBJECTIVES`.
        cost (`str`): the cost model that measured the work, in words; "rows" is compact work.
    """

    slots: tuple[tuple[Microbatch | None, ...], ...]
    num_tokens: int
    windows: tuple[Window, ...] = ()
    objective: str = "slot_critical"
    cost: str = "rows"

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """All microbatches, slot by slot."""
        return tuple(m for slot in self.slots for m in slot if m is not None)

    @property
    def compact_tokens(self) -> int:
        """Compact work of the step, in rows: what all replicas compute together, producers included."""
        return sum(m.rows for m in self.microbatches) + sum(self.producer_rows)

    @property
    def producer_rows(self) -> tuple[int, ...]:
        """Rows that each window's producer computes: the prefix, without that of the window around it."""
        prefixes = [w.prefix_tokens for w in self.windows]
        return tuple(w.prefix_tokens - (0 if w.parent is None else prefixes[w.parent]) for w in self.windows)

    def windows_above(self, window: int | None) -> tuple[int, ...]:
        """The window and those around it, outermost first; empty for `None`."""
        path: list[int] = []
        while window is not None:
            path.append(window)
            window = self.windows[window].parent
        return tuple(path[::-1])

    def of_replica(self, replica: int) -> "StepPlan":
        """What one replica runs, as a plan for it alone: slots and windows of the others are left out.

        Indices of trajectories stay those of the whole step, and so does `num_tokens`. A replica that has nothing to
        run has no slot.
        """
        kept = [slot for slot, row in enumerate(self.slots) if row[replica] is not None]
        place = {slot: k for k, slot in enumerate(kept)}
        own = [w for w, window in enumerate(self.windows) if window.replica == replica]
        number: dict[int | None, int | None] = {w: k for k, w in enumerate(own)}
        number[None] = None
        windows = tuple(
            dataclasses.replace(
                self.windows[w],
                replica=0,
                consumers=tuple(place[slot] for slot in self.windows[w].consumers),
                parent=number[self.windows[w].parent],
            )
            for w in own
        )
        slots = []
        for slot in kept:
            microbatch = self.slots[slot][replica]
            assert microbatch is not None  # as chosen above
            slots.append((dataclasses.replace(microbatch, window=number[microbatch.window]),))
        return dataclasses.replace(self, slots=tuple(slots), windows=windows)

    @property
    def compression(self) -> float:
        """Expanded tokens per computed row."""
        return self.num_tokens / self.compact_tokens

    @property
    def slot_rows(self) -> tuple[tuple[int, ...], ...]:
        """`[slot][replica]`: rows that a replica runs in a slot, a producer charged to its first consumer's slot."""
        rows = [[0 if m is None else m.rows for m in slot] for slot in self.slots]
        for window, produced in zip(self.windows, self.producer_rows, strict=True):
            rows[window.consumers[0]][window.replica] += produced
        return tuple(map(tuple, rows))

    @property
    def slot_balances(self) -> tuple[float, ...]:
        """Per slot: mean over heaviest work of the replicas, in (0, 1]."""
        return tuple(sum(rows) / (len(rows) * max(rows)) for rows in self.slot_rows)

    @property
    def balance(self) -> float:
        """Mean over slots of (mean work / heaviest work) over the replicas, in (0, 1]; 1.0 for one replica."""
        return sum(self.slot_balances) / len(self.slots)

    @property
    def slot_critical_rows(self) -> int:
        """Sum over slots of the heaviest replica's rows: the step's length if replicas wait for each other."""
        return sum(map(max, self.slot_rows))

    @property
    def replica_critical_rows(self) -> int:
        """Largest cumulative rows of a replica: the step's length if replicas wait for each other only at its end."""
        return max(map(sum, zip(*self.slot_rows, strict=True)))


OBJECTIVES = ("compact_work", "slot_critical", "replica_critical")
