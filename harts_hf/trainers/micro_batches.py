"""TRL's padded micro-batches and the trajectories in them: which token stands where.

TRL holds a micro-batch as `input_ids` = left-padded prompts and right-padded completions. A stock micro-batch is the
unit of TRL's loss; trajectories of several are planned together, and each keeps its place here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harts_hf.batch import CompactBatch
from harts_hf.execution import MicrobatchResult, Trajectory
from harts_hf.models.routing import RouterSums, router_sums
from harts_hf.planning.plan import StepPlan


@dataclass(frozen=True, eq=False)
class PlacedTrajectory(Trajectory):
    """A trajectory and its place among the stock micro-batches of a step.

    Attributes:
        micro_batch (`int`): which stock micro-batch; those of all ranks are numbered together once they are shared.
        row (`int`): which row of it.
        first_column (`int`): column of the first token in the completion; prompt tokens stand below 0.
    """

    micro_batch: int
    row: int
    first_column: int

    @property
    def scored_columns(self) -> np.ndarray:
        """Columns of the scored tokens in the completion: `[n]`, int64."""
        return np.flatnonzero(self.scored) + self.first_column


def place_trajectories(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor,
    completion_width: int,
    *,
    loss_mask: torch.Tensor | None = None,
    micro_batch: int = 0,
) -> list[PlacedTrajectory]:
    """The trajectories of one padded batch.

    Tokens are taken by the mask, never by their id: a pad token that is also EOS is no special case.

    Args:
        input_ids, attention_mask (`[B, T]`): left-padded prompt and right-padded completion.
        completion_width (`int`): the last columns that are completion (TRL: `logits_to_keep`).
        loss_mask (`[B, completion_width]`, *optional*): completion tokens that are scored; all by default.
        micro_batch (`int`): recorded in the result.

    Raises:
        ValueError: a row has a hole in its attention mask, no token at all, or a scored token with no token before it.
    """
    ids = input_ids.cpu().numpy()
    attended = attention_mask.cpu().numpy().astype(bool)
    wanted = None if loss_mask is None else loss_mask.cpu().numpy().astype(bool)
    first_completion = ids.shape[1] - completion_width
    placed = []
    for row in range(len(ids)):
        kept = np.flatnonzero(attended[row])
        if len(kept) == 0:
            raise ValueError(f"row {row} of micro-batch {micro_batch} has no token: its attention mask is all zero")
        if kept[-1] - kept[0] + 1 != len(kept):
            raise ValueError(
                f"row {row} of micro-batch {micro_batch}: attention_mask has a hole; mask tokens out of the loss with "
                "tool_mask (env_mask) instead, or leave them out of the ids"
            )
        columns = kept - first_completion
        scored = columns >= 0
        if wanted is not None:
            scored &= wanted[row][np.maximum(columns, 0)]
        if scored[0]:
            raise ValueError(
                f"row {row} of micro-batch {micro_batch} has an empty prompt: its first token has no context"
            )
        placed.append(PlacedTrajectory(ids[row, kept], scored, micro_batch, row, int(columns[0])))
    return placed


@dataclass(frozen=True, eq=False)
class Placement:
    """Where the scored tokens of one compact batch stand in one stock micro-batch.

    Attributes:
        rows, columns, scores (`[n]`, int64): the token at `[rows, columns]` of the micro-batch's completions is scored
            token `scores` of the compact batch. A score that several trajectories share appears several times.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    scores: torch.Tensor

    def scatter(self, values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """`out` (`[B, T]`) with the compact batch's `values` (`[P]`) in their places; differentiable in both."""
        return out.index_put((self.rows, self.columns), values[self.scores].to(out.dtype))

    def gather_gradient(self, gradient: torch.Tensor, num_scores: int) -> torch.Tensor:
        """Sum of a `[B, T]` gradient over the places of each scored token: `[P]`, in `gradient`'s dtype."""
        total = gradient.new_zeros(num_scores)  # index_put_ sorts, so the sum has one order on every device
        return total.index_put_((self.scores,), gradient[self.rows, self.columns], accumulate=True)


def placements(batch: CompactBatch, placed: Sequence[PlacedTrajectory]) -> dict[int, Placement]:
    """Where the scored tokens of a compact batch stand, per stock micro-batch.

    Args:
        placed: the batch's trajectories, in the batch's order.

    Returns:
        micro-batch index -> [`Placement`], in increasing order of the index.
    """
    parts: dict[int, list[np.ndarray]] = {}
    for i, trajectory in enumerate(placed):
        columns = trajectory.scored_columns
        part = np.stack([np.full_like(columns, trajectory.row), columns, batch.scores(i)[trajectory.scored]])
        parts.setdefault(trajectory.micro_batch, []).append(part)
    return {
        micro_batch: Placement(*torch.from_numpy(np.concatenate(parts[micro_batch], axis=1)).to(batch.device))
        for micro_batch in sorted(parts)
    }


def router_sums_of(
    result: MicrobatchResult, placed: Sequence[PlacedTrajectory], num_micro_batches: int, top_k: int
) -> RouterSums:
    """Sums for the load-balancing loss of each stock micro-batch, over the known rows of one compact batch.

    Args:
        result: of a forward that was asked for router logits.
        placed: the batch's trajectories, in the batch's order.
        num_micro_batches: of the step.
        top_k: experts per token.
    """
    batch, logits = result.batch, result.output.router_logits
    assert logits is not None
    weights = np.zeros((num_micro_batches, batch.num_known_rows), dtype=np.float32)  # trajectories through each row
    for rows, trajectory in zip(batch.rows, placed, strict=True):
        weights[trajectory.micro_batch, rows] += 1
    return router_sums(logits, torch.from_numpy(weights).to(batch.device), top_k)


def splits_a_micro_batch(plan: StepPlan, placed: Sequence[PlacedTrajectory]) -> bool:
    """Whether trajectories of one stock micro-batch run in different microbatches of the plan."""
    home: dict[int, int] = {}
    for k, microbatch in enumerate(plan.microbatches):
        for i in microbatch.trajectories:
            if home.setdefault(placed[i].micro_batch, k) != k:
                return True
    return False
