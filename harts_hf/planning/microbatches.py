"""plan_step: trajectories -> the microbatches of one optimizer step.

Works on the sorted trajectories and the longest common prefixes (LCPs) of neighbours, never on tokens: a contiguous
range of sorted trajectories costs the sum of its lengths minus the sum of its inner LCPs, so splitting between two
neighbours costs their LCP.
"""

import warnings
from collections.abc import Sequence

import numpy as np

from harts_hf.tree import PrefixTree

from .plan import Microbatch, StepPlan


def plan_step(sequences: Sequence | PrefixTree, max_tokens: int = 32768, num_replicas: int = 1) -> StepPlan:
    """Plan the microbatches of one optimizer step.

    A heuristic: sorted trajectories fill a microbatch until the next one no longer fits `max_tokens`; microbatches of
    similar work share a slot. A pure function of its input, so every rank derives the same plan.

    Args:
        sequences: list of 1-D integer arrays or lists, in any order, or the `PrefixTree` built from them.
        max_tokens: most rows of a microbatch. A trajectory longer than this runs alone, with a warning.
        num_replicas: data-parallel replicas; a slot has one microbatch, or `None`, for each.

    Returns:
        A plan in which every trajectory is in exactly one microbatch.

    Raises:
        ValueError: `max_tokens` or `num_replicas` below 1, or sequences that `PrefixTree.from_sequences` refuses.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if num_replicas < 1:
        raise ValueError(f"num_replicas must be at least 1, got {num_replicas}")
    tree = sequences if isinstance(sequences, PrefixTree) else PrefixTree.from_sequences(sequences)
    order = tree.sorted_order
    lengths = tree.lengths[order]
    _warn_of_long_trajectories(order, lengths, max_tokens)

    microbatches = []
    for start, end in _fill_in_order(lengths, tree.sorted_lcp, max_tokens):
        rows = int(lengths[start:end].sum() - tree.sorted_lcp[start + 1 : end].sum())
        microbatches.append(Microbatch(trajectories=tuple(order[start:end].tolist()), rows=rows))
    microbatches.sort(key=lambda m: -m.rows)
    slots = []
    for first in range(0, len(microbatches), num_replicas):
        slot = microbatches[first : first + num_replicas]
        slots.append(tuple(slot + [None] * (num_replicas - len(slot))))
    return StepPlan(slots=tuple(slots), num_tokens=tree.num_tokens)


def _fill_in_order(lengths: np.ndarray, lcp: np.ndarray, max_tokens: int) -> list[tuple[int, int]]:
    """Contiguous ranges `[start, end)` of sorted trajectories, each filled until the next trajectory does not fit."""
    # Rows of [start, end) are added[start + 1:end].sum() + lengths[start].
    added = np.concatenate([[0], np.cumsum(lengths - lcp)])
    ranges = []
    start = 0
    while start < len(lengths):
        room = max_tokens - lengths[start] + added[start + 1]
        end = max(start + 1, int(np.searchsorted(added, room, side="right")) - 1)
        ranges.append((start, end))
        start = end
    return ranges


def _warn_of_long_trajectories(order: np.ndarray, lengths: np.ndarray, max_tokens: int) -> None:
    """Name the trajectories that exceed the budget by themselves."""
    for k in np.flatnonzero(lengths > max_tokens):
        warnings.warn(
            f"trajectory {order[k]} has {lengths[k]} tokens, more than max_tokens={max_tokens}; it runs alone",
            stacklevel=3,
        )
