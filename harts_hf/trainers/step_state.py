"""What is known of one optimizer step while its microbatches run, per stock micro-batch."""

from collections.abc import Sequence
from typing import Any

import torch

from harts_hf.distributed.ranks import Ranks
from harts_hf.models.routing import RouterSums, load_balancing_loss
from harts_hf.models.tree_forward import TreeOutput

from .loss_oracle import LossGradient, LossInputs
from .micro_batches import Placement

# Largest relative difference between the gradient a microbatch used and the final one. Losses that do not couple
# trajectories give the same bits; a coupled loss differs in the first digits.
_COUPLING_TOLERANCE = 1e-4


class StepState:
    """Log-probs, entropies and gradients of one optimizer step, per stock micro-batch that this rank needs.

    Tokens that the loss does not read keep their old log-prob: their ratio is then 1, so that a masked token can give
    neither an infinity nor a NaN.

    Args:
        micro_batches: number of a stock micro-batch -> TRL's inputs of it.
        device: where the tensors live.

    Attributes:
        micro_batches: as given.
        log_probs, entropies (dicts of `[B, T]`, fp32): per stock micro-batch, detached; filled as microbatches run.
        gradients (dict of `[2, B, T]`, fp32): the gradients used, with respect to log-probs and to entropies.
        entropy_masks (dict of `[B, T]`, bool): tokens above the entropy quantile; empty unless that option is on.
        has_totals (`bool`): whether the router sums are those of the whole step.
    """

    def __init__(self, micro_batches: dict[int, dict[str, Any]], device: torch.device):
        self.micro_batches = micro_batches
        self.log_probs: dict[int, torch.Tensor] = {}
        for m, inputs in micro_batches.items():
            filler = inputs.get("old_per_token_logps")
            if filler is None:
                filler = inputs.get("ref_per_token_logps")
            if filler is None:
                filler = torch.zeros(inputs["completion_ids"].shape, device=device)
            self.log_probs[m] = filler.float().clone()
        self.entropies = {m: torch.zeros_like(x) for m, x in self.log_probs.items()}
        self.gradients = {m: torch.zeros(2, *x.shape, device=device) for m, x in self.log_probs.items()}
        self.entropy_masks: dict[int, torch.Tensor] = {}
        self.has_totals = False
        self._router_sums: RouterSums | None = None

    def fill(self, m: int, placement: Placement, output: TreeOutput) -> None:
        """Put a compact batch's log-probs and entropies into micro-batch `m`."""
        assert output.entropies is not None  # every forward of a step asks for them
        self.log_probs[m] = placement.scatter(output.log_probs.detach(), self.log_probs[m])
        self.entropies[m] = placement.scatter(output.entropies.detach(), self.entropies[m])

    def loss_inputs(self, m: int, aux_loss: torch.Tensor | None = None) -> LossInputs:
        """What `compute_loss` of micro-batch `m` is given, as far as it is known; without `aux_loss` that is 0."""
        if aux_loss is None:
            aux_loss = torch.zeros((), device=self.log_probs[m].device)
        return LossInputs(self.log_probs[m], self.entropies[m], aux_loss, self.entropy_masks.get(m))

    def remember(self, m: int, placement: Placement, used: LossGradient) -> None:
        """Keep the gradient that was used for the tokens of a placement."""
        at = (placement.rows, placement.columns)
        self.gradients[m][0][at] = used.log_probs[at].float()
        if used.entropies is not None:
            self.gradients[m][1][at] = used.entropies[at].float()

    def read(self, m: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Log-probs, entropies and both gradients used of some tokens of micro-batch `m`: `[4, n]`, fp32."""
        known = (self.log_probs[m], self.entropies[m], *self.gradients[m])
        return torch.stack([values[rows, columns] for values in known])

    def write(self, m: int, rows: torch.Tensor, columns: torch.Tensor, values: torch.Tensor) -> None:
        """Put what [`StepState.read`] returned on the rank that ran these tokens."""
        self.log_probs[m][rows, columns] = values[0]
        self.entropies[m][rows, columns] = values[1]
        self.gradients[m][:, rows, columns] = values[2:]

    def coupling(self, m: int, final: LossGradient, loss_type: str) -> str | None:
        """What to tell if the gradient with all log-probs known differs from the one that was used, else `None`."""
        for name, used, known in zip(
            ("log-probs", "entropies"), self.gradients[m], (final.log_probs, final.entropies), strict=True
        ):
            known = torch.zeros_like(used) if known is None else known.float().nan_to_num()
            difference = (used.nan_to_num() - known).abs().max()
            if difference > _COUPLING_TOLERANCE * known.abs().max():
                return (
                    f"the loss '{loss_type}' couples trajectories: its gradient with respect to the {name} changed by "
                    f"{difference.item():.3g} once all of the step were known, so splitting the step into planned "
                    "microbatches would train on a wrong gradient. Nothing was updated. Set max_tokens_per_microbatch "
                    "so large that a step is one microbatch, and gradient_accumulation_steps=1."
                )
        return None

    def sum_router_sums(self, ranks: Ranks) -> None:
        """Make the router sums those of all ranks. Collective; each rank has added some, if only of weight 0."""
        assert self._router_sums is not None
        self._router_sums = self._router_sums.map(ranks.sum)
        self.has_totals = True

    def add_router_sums(self, sums: RouterSums) -> None:
        """Add a microbatch's sums, without their graph."""
        sums = sums.detach()
        self._router_sums = sums if self._router_sums is None else self._router_sums + sums

    def totals_for(self, sums: RouterSums) -> RouterSums:
        """The sums to normalise a microbatch with: the step's after a pre-pass, else its own, which are then whole."""
        if not self.has_totals:
            return sums.detach()
        assert self._router_sums is not None  # the pre-pass added them
        return self._router_sums

    def aux_losses(self) -> Sequence[torch.Tensor]:
        """The router's auxiliary loss of each stock micro-batch, once all microbatches have added their sums."""
        assert self._router_sums is not None
        return load_balancing_loss(self._router_sums, self._router_sums).unbind()
