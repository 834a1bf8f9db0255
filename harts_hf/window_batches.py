"""The compact batches of a plan: plain ones, a window's producer, its consumers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harts_hf.batch import CompactBatch
from harts_hf.boundary import Boundary
from harts_hf.planning.consumer_tree import consumer_tree, place_on_prefix, producer_tree
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.tree import PrefixTree


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One trajectory of a step.

    Attributes:
        token_ids (`[len]`, int64): its tokens.
        scored (`[len]`, bool): tokens whose log-prob is wanted; False for the first, which has no context.
    """

    token_ids: np.ndarray
    scored: np.ndarray


class WindowBatches:
    """Makes the batches of one replica's plan.

    Args:
        plan: a plan for one replica, of indices into `trajectories`.
        trajectories: the step's trajectories.
        device: where the batches' tensors live.
    """

    def __init__(self, plan: StepPlan, trajectories: Sequence[Trajectory], device: torch.device):
        self._plan = plan
        self._trajectories = trajectories
        self._device = device
        self._prefixes = [trajectories[w.trajectory].token_ids[: w.prefix_tokens] for w in plan.windows]
        # Of each window's prefix: trajectories of all consumers that pass through, and whether some scores the token.
        self._counts = [np.zeros(w.prefix_tokens, dtype=np.int64) for w in plan.windows]
        self._scored = [np.zeros(w.prefix_tokens, dtype=bool) for w in plan.windows]
        for microbatch in plan.microbatches:
            if microbatch.window is None:
                continue
            for i in microbatch.trajectories:
                trajectory = trajectories[i]
                place = max(0, place_on_prefix(trajectory.token_ids, self._prefixes[microbatch.window]))
                for window in plan.windows_above(microbatch.window):
                    taken = min(place, plan.windows[window].prefix_tokens)
                    self._counts[window][:taken] += 1
                    self._scored[window][:taken] |= trajectory.scored[:taken]

    def of_producer(self, window: int, starts_from: Boundary | None, produces: Boundary) -> CompactBatch:
        """The batch that computes a window's prefix behind that of the window around it, and fills `produces`."""
        tree = producer_tree(self._prefixes[window], produces.start, self._counts[window])
        return CompactBatch(
            tree,
            [self._scored[window]],
            self._device,
            prefix_scored=self._prefix_scored(self._plan.windows[window].parent),
            starts_from=starts_from,
            produces=produces,
        )

    def of_microbatch(self, microbatch: Microbatch, starts_from: Boundary | None) -> CompactBatch:
        """The batch of a microbatch's own rows; trajectory `i` of it is `microbatch.trajectories[i]`."""
        own = [self._trajectories[i] for i in microbatch.trajectories]
        sequences, scored = [t.token_ids for t in own], [t.scored for t in own]
        if microbatch.window is None:
            return CompactBatch(PrefixTree.from_sequences(sequences), scored, self._device)
        return CompactBatch(
            consumer_tree(sequences, self._prefixes[microbatch.window]),
            scored,
            self._device,
            prefix_scored=self._prefix_scored(microbatch.window),
            starts_from=starts_from,
        )

    def _prefix_scored(self, window: int | None) -> np.ndarray | None:
        """Which tokens of a window's prefix its producer, and those around it, have scored."""
        if window is None:
            return None
        scored = np.zeros(self._plan.windows[window].prefix_tokens, dtype=bool)
        first = 0
        for owner in self._plan.windows_above(window):  # outermost first: each producer scores its own rows
            last = self._plan.windows[owner].prefix_tokens
            scored[first:last] = self._scored[owner][first:last]
            first = last
        return scored
