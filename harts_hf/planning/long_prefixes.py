"""Chains of producers: what is longer than a forward may be is computed in several, one window inside another.

A trajectory above the budget is computed piece by piece: each piece but the last is the producer of a window whose
only consumer is what follows. A shared prefix above the budget is divided likewise. No row is computed twice, and
slots, membership and charges stay as they were.
"""

from collections.abc import Sequence
from dataclasses import replace

from .plan import Microbatch, StepPlan, Window


def divide_long_paths(plan: StepPlan, lengths: Sequence[int], max_tokens: int, chunk_size: int) -> StepPlan:
    """A plan in which no forward computes more than `max_tokens` rows.

    Args:
        plan: a plan whose microbatches above `max_tokens` rows are one path each, as `plan_step` makes them.
        lengths: of the step's trajectories, in tokens.
        max_tokens: most rows of a producer or a microbatch.
        chunk_size: pieces end at multiples of it where they can, so that nothing is replayed.
    """
    windows: list[Window] = []
    number: list[int] = []  # of each window of `plan` among `windows`

    def add_chain(window: Window, ends: list[int], parent: int | None) -> int | None:
        for end in ends:
            windows.append(replace(window, prefix_tokens=end, parent=parent))
            parent = len(windows) - 1
        return parent

    for window in plan.windows:
        parent = None if window.parent is None else number[window.parent]
        start = 0 if parent is None else windows[parent].prefix_tokens
        ends = [*_ends(start, window.prefix_tokens, max_tokens, chunk_size), window.prefix_tokens]
        add_chain(window, ends, parent)
        number.append(len(windows) - 1)

    slots = []
    for s, slot in enumerate(plan.slots):
        divided: list[Microbatch | None] = []
        for replica, microbatch in enumerate(slot):
            if microbatch is not None:
                longest = max(microbatch.trajectories, key=lengths.__getitem__)
                outer = None if microbatch.window is None else number[microbatch.window]
                start = 0 if outer is None else windows[outer].prefix_tokens
                is_long = microbatch.rows > max_tokens
                ends = _ends(start, lengths[longest], max_tokens, chunk_size) if is_long else []
                inner = add_chain(Window(longest, 0, replica, (s,)), ends, outer)
                rows = microbatch.rows - (ends[-1] - start if ends else 0)
                microbatch = Microbatch(microbatch.trajectories, rows, inner)
            divided.append(microbatch)
        slots.append(tuple(divided))
    return replace(plan, slots=tuple(slots), windows=tuple(windows))


def _ends(start: int, end: int, max_tokens: int, chunk_size: int) -> list[int]:
    """Where to cut a path from `start` to `end` so that no piece is longer than `max_tokens`."""
    ends = []
    while end - start > max_tokens:
        cut = start + max_tokens
        aligned = cut - cut % chunk_size
        start = aligned if aligned > start else cut
        ends.append(start)
    return ends
