"""StepPlan: which trajectories run together, where and in what order, in one optimizer step. Data only, numpy-free."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Microbatch:
    """Whole trajectories that run in one forward and backward.

    Attributes:
        trajectories (`tuple[int, ...]`): indices into the step's trajectories, in lexicographic order of their tokens.
        rows (`int`): compact work, the number of rows of the trajectories' prefix tree.
    """

    trajectories: tuple[int, ...]
    rows: int


@dataclass(frozen=True)
class StepPlan:
    """The microbatches of one optimizer step.

    Attributes:
        slots (`tuple[tuple[Microbatch | None, ...], ...]`): `slots[slot][replica]`; `None` where a replica has nothing
            to run in a slot.
        num_tokens (`int`): expanded tokens S of the step.
    """

    slots: tuple[tuple[Microbatch | None, ...], ...]
    num_tokens: int

    @property
    def microbatches(self) -> tuple[Microbatch, ...]:
        """All microbatches, slot by slot."""
        return tuple(m for slot in self.slots for m in slot if m is not None)

    @property
    def compact_tokens(self) -> int:
        """Compact work of the step, in rows: what all replicas compute together."""
        return sum(m.rows for m in self.microbatches)

    @property
    def compression(self) -> float:
        """Expanded tokens per computed row."""
        return self.num_tokens / self.compact_tokens

    @property
    def balance(self) -> float:
        """Mean over slots of (mean work / heaviest work) over the replicas, in (0, 1]; 1.0 for one replica."""
        per_slot = []
        for slot in self.slots:
            work = [0 if m is None else m.rows for m in slot]
            per_slot.append(sum(work) / (len(work) * max(work)))
        return sum(per_slot) / len(per_slot)
