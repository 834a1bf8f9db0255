"""The order in which a replica runs its producers and microbatches, and the one order that all replicas share.

Replicas that only meet at the end of a step (DDP) each run their own part of a plan. Where every forward and backward
has collectives inside (FSDP, expert parallelism), all have to run the same kinds of operations in the same order:
whoever has nothing for an operation runs a filler.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal

from .plan import StepPlan

Kind = Literal["produce", "microbatch", "hand_back"]


@dataclass(frozen=True)
class Operation:
    """One step of a program.

    Attributes:
        kind (`str`): "produce", a forward of a window's producer; "microbatch", a forward and its backward;
            "hand_back", the backward of a producer.
        index (`int | None`): window or microbatch in the replica's own plan ([`StepPlan.of_replica`]); `None` for a
            filler, which runs two rows that stand for nothing.
        lane (`int`): the same for a "produce" and its "hand_back", and for no other pair; -1 for a microbatch.
    """

    kind: Kind
    index: int | None
    lane: int = -1


def plan_program(plan: StepPlan, replica: int = 0) -> tuple[Operation, ...]:
    """What a replica runs, in order; kinds and lanes are the same for all replicas of the plan.

    A window is alive from the slot of its first consumer to that of its last. For each such interval there are as many
    lanes as the replica with most windows of that interval needs. In a slot, lanes that end later open first, and
    those that opened later close first, so that windows nest on every replica. With one replica there is no filler.

    Args:
        plan: of any number of replicas; a plan without slots gives one filler microbatch.
        replica: whose program.
    """
    if not plan.slots:
        return (Operation("microbatch", None),)
    windows: dict[tuple[int, int], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    for w in sorted(range(len(plan.windows)), key=lambda w: len(plan.windows_above(w))):  # outermost first
        window = plan.windows[w]
        windows[window.consumers[0], window.consumers[-1]][window.replica].append(w)
    own_number = {w: k for k, w in enumerate(w for w, x in enumerate(plan.windows) if x.replica == replica)}

    lanes: dict[tuple[int, int], list[tuple[int | None, int]]] = {}  # interval -> window and lane of each
    num_lanes = 0
    for interval in sorted(windows):
        own = windows[interval][replica]
        size = max(map(len, windows[interval].values()))
        lanes[interval] = [(own_number[own[k]] if k < len(own) else None, num_lanes + k) for k in range(size)]
        num_lanes += size

    program: list[Operation] = []
    num_microbatches = 0
    for slot, row in enumerate(plan.slots):
        for interval in sorted((i for i in lanes if i[0] == slot), key=lambda i: -i[1]):
            program += [Operation("produce", window, lane) for window, lane in lanes[interval]]
        has_own = row[replica] is not None
        program.append(Operation("microbatch", num_microbatches if has_own else None))
        num_microbatches += has_own
        for interval in sorted((i for i in lanes if i[1] == slot), key=lambda i: -i[0]):
            program += [Operation("hand_back", window, lane) for window, lane in reversed(lanes[interval])]
    return tuple(program)
