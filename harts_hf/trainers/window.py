"""What is known of one optimizer step while its microbatches run, per stock micro-batch."""

from collections.abc import Sequence
from typing import Any

import torch

from harts_hf.models.enable import TreeOutput
from harts_hf.models.routing import RouterSums, load_balancing_loss

from .loss_oracle import LossGradient, LossInputs
from .micro_batches import Placement

# Largest relative difference between the gradient a microbatch used and the final one. Losses that do not couple
# trajectories give the same bits; a coupled loss differs in the first digits.
_COUPLING_TOLERANCE = 1e-4


class WindowState:
    """Log-probs, entropies and gradients of one optimizer step, per stock micro-batch.

    Tokens that the loss does not read keep their old log-prob: their ratio is then 1, so that a masked token can give
    neither an infinity nor a NaN.
    """

    def __init__(self, window: list[dict[str, Any]], device: torch.device):
        self.window = window
        self.log_probs = []
        for inputs in window:
            filler = inputs.get("old_per_token_logps")
            if filler is None:
                filler = inputs.get("ref_per_token_logps")
            if filler is None:
                filler = torch.zeros(inputs["completion_ids"].shape, device=device)
            self.log_probs.append(filler.float().clone())
        self.entropies = [torch.zeros_like(x) for x in self.log_probs]
        self.gradients = [torch.zeros(2, *x.shape, device=device) for x in self.log_probs]
        self.entropy_masks: list[torch.Tensor | None] = [None] * len(window)
        self.has_totals = False  # whether the router sums are those of the whole step
        self._router_sums: RouterSums | None = None

    def fill(self, m: int, placement: Placement, output: TreeOutput) -> None:
        """Put a compact batch's log-probs and entropies into micro-batch `m`."""
        self.log_probs[m] = placement.scatter(output.log_probs.detach(), self.log_probs[m])
        self.entropies[m] = placement.scatter(output.entropies.detach(), self.entropies[m])

    def loss_inputs(self, m: int, aux_loss: torch.Tensor | None = None) -> LossInputs:
        if aux_loss is None:
            aux_loss = torch.zeros((), device=self.log_probs[m].device)
        return LossInputs(self.log_probs[m], self.entropies[m], aux_loss, self.entropy_masks[m])

    def remember(self, m: int, placement: Placement, used: LossGradient) -> None:
        """Keep the gradient that was used for the tokens of a placement."""
        at = (placement.rows, placement.columns)
        self.gradients[m][0][at] = used.log_probs[at].float()
        self.gradients[m][1][at] = used.entropies[at].float()

    def refuse_coupling(self, m: int, final: LossGradient, loss_type: str) -> None:
        """Raise if the gradient with all log-probs known differs from the one that was used."""
        for name, used, known in zip(
            ("log-probs", "entropies"), self.gradients[m], (final.log_probs, final.entropies), strict=True
        ):
            difference = (used - known.float()).nan_to_num().abs().max()
            if difference > _COUPLING_TOLERANCE * known.float().nan_to_num().abs().max():
                raise RuntimeError(
                    f"the loss '{loss_type}' couples trajectories: its gradient with respect to the {name} changed by "
                    f"{difference.item():.3g} once all of the step were known, so splitting the step into planned "
                    "microbatches would train on a wrong gradient. Nothing was updated. Set max_tokens_per_microbatch "
                    "so large that a step is one microbatch, and gradient_accumulation_steps=1."
                )

    def add_router_sums(self, sums: RouterSums) -> None:
        sums = sums.detach()
        self._router_sums = sums if self._router_sums is None else self._router_sums + sums

    def totals_for(self, sums: RouterSums) -> RouterSums:
        """The sums to normalise a microbatch with: the step's after a pre-pass, else its own, which are then whole."""
        return self._router_sums if self.has_totals else sums.detach()

    def aux_losses(self) -> Sequence[torch.Tensor]:
        """The router's auxiliary loss of each stock micro-batch."""
        return load_balancing_loss(self._router_sums, self._router_sums).unbind()
