"""plan_step: trajectories -> the microbatches of one optimizer step.

Two levels. The first plans without sharing across microbatches: an exact program over contiguous partitions and greedy
packings compete, then runs of trajectories move between microbatches (`level_one.py`). The second adds sharing windows
(`level_two.py`). Both work on the sorted trajectories and the LCPs of neighbours, never on tokens.
"""

import warnings
from collections.abc import Sequence

from harts_hf.tree import PrefixTree

from .cost import CostModel
from .draft import Draft
from .level_one import plan_without_windows
from .level_two import plan_with_windows
from .long_prefixes import divide_long_paths
from .plan import OBJECTIVES, Microbatch, StepPlan, Window
from .units import Units
from .window_memory import WindowMemory

MAX_UNITS = 2500  # above this, neighbouring units are joined before planning


def plan_step(
    sequences: Sequence | PrefixTree,
    max_tokens: int = 32768,
    num_replicas: int = 1,
    windows: bool = False,
    *,
    objective: str = "slot_critical",
    cost: CostModel | None = None,
    window_memory: WindowMemory | None = None,
) -> StepPlan:
    """Plan the microbatches of one optimizer step.

    A heuristic around exact parts (`partition.py`, `window_partition.py`), and a pure function of its input, so every
    rank derives the same plan. Plans are compared by `objective` first, then by the other two in the order of
    `OBJECTIVES`: total compact work; the sum over slots of the slot's heaviest replica; the largest cumulative work of
    a replica. Slot-critical work is the default because it is the step's length when replicas wait for each other. A
    plan with windows is never worse than the plan without in this order.

    Args:
        sequences: list of 1-D integer arrays or lists, in any order, or the `PrefixTree` built from them.
        max_tokens: most rows that a replica runs in a slot, a producer's rows included. A trajectory longer than this
            has a slot of its replica to itself; its own prefixes, which add no row, run with it. With windows it runs
            in pieces of at most `max_tokens` rows, else in one, with a warning.
        num_replicas: data-parallel replicas; a slot has one microbatch for each. `None` stands in the slots only if
            there are fewer trajectories than replicas times slots, or if total work comes first and one more
            microbatch would add to it.
        windows: share prefixes across consecutive microbatches of a replica. The plan then needs an executor that runs
            producers.
        objective: one of `OBJECTIVES`.
        cost: what work is counted in; rows if `None`.
        window_memory: what a window keeps alive and how much it may; unbounded if `None`. The pieces of a trajectory
            above `max_tokens` are alive together whatever they keep.

    Returns:
        A plan in which every trajectory is in exactly one microbatch.

    Raises:
        ValueError: `max_tokens` or `num_replicas` below 1, an unknown objective, or sequences that
            `PrefixTree.from_sequences` refuses.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    if objective not in OBJECTIVES:
        raise ValueError(f"objective must be one of {OBJECTIVES}, got {objective!r}")
    tree = sequences if isinstance(sequences, PrefixTree) else PrefixTree.from_sequences(sequences)
    units = Units.from_tree(tree, CostModel() if cost is None else cost)
    if not windows:
        _warn_of_long_trajectories(tree, units, max_tokens)
    units = units.coarsened(max(MAX_UNITS, 16 * num_replicas), max_tokens)
    order = _comparison(objective)
    if windows:
        max_prefix = units.total_rows if window_memory is None else window_memory.max_prefix_tokens
        draft = plan_with_windows(units, max_tokens, num_replicas, max_prefix, order)
    else:
        draft = plan_without_windows(units, max_tokens, num_replicas, order)
    plan = to_step_plan(draft, tree, objective)
    return divide_long_paths(plan, tree.lengths.tolist(), max_tokens, units.cost.chunk_size) if windows else plan


def _comparison(objective: str) -> tuple[int, ...]:
    """Indices of `Draft.objectives()` in order of comparison."""
    first = OBJECTIVES.index(objective)
    return (first, *(k for k in range(len(OBJECTIVES)) if k != first))


def _warn_of_long_trajectories(tree: PrefixTree, units: Units, max_tokens: int) -> None:
    """Name the trajectories that exceed the budget by themselves."""
    for unit, rows in enumerate(units.unit_rows):
        if rows > max_tokens:
            trajectory = tree.sorted_order[units.first[unit + 1] - 1]
            nested = units.first[unit + 1] - units.first[unit] - 1
            prefixes = f", with {nested} trajectories that are its prefixes and add no row" if nested else ""
            warnings.warn(
                f"trajectory {trajectory} has {rows} tokens, more than max_tokens={max_tokens}; "
                f"it runs alone{prefixes}",
                stacklevel=3,
            )


def to_step_plan(draft: Draft, tree: PrefixTree, objective: str) -> StepPlan:
    """The plan that a draft stands for; a window of which one consumer is left is none."""
    order = tree.sorted_order.tolist()
    first = draft.units.first.tolist()
    consumers: list[list[int]] = [[] for _ in draft.windows]
    for b in draft.bins:
        if b.window is not None and b.members:
            consumers[b.window].append(b.slot)
    windows: list[Window] = []
    renumbered: dict[int, int] = {}
    grid: list[list[Microbatch | None]] = [[None] * draft.num_replicas for _ in range(draft.num_slots)]
    for b in sorted(draft.bins, key=lambda b: (b.slot, b.replica)):
        if not b.members:
            continue
        trajectories = tuple(order[k] for u in b.members for k in range(first[u], first[u + 1]))
        rows, window = b.rows, None
        if b.window is not None and len(consumers[b.window]) == 1:
            rows, _ = draft.charge(b.members, None, False)  # members outside of the window's prefix share rows too
        elif b.window is not None:
            shared = draft.windows[b.window]
            tokens = shared.tokens
            if b.window not in renumbered:
                renumbered[b.window] = len(windows)
                owner = order[first[shared.start + 1] - 1]
                windows.append(Window(owner, tokens, b.replica, tuple(sorted(consumers[b.window]))))
            window = renumbered[b.window]
            rows -= tokens if b.produces else 0
        grid[b.slot][b.replica] = Microbatch(trajectories, rows, window)
    slots = tuple(tuple(slot) for slot in grid if any(m is not None for m in slot))
    return StepPlan(slots, tree.num_tokens, tuple(windows), objective, draft.units.cost.describe())
