"""TRL's own `compute_loss` as the loss: log-probs in, their gradient out.

The trainer computes log-probs over the prefix tree, in whatever microbatches the plan asks for; what they are worth is
left to TRL. For one stock micro-batch, `compute_loss` runs on leaf tensors and autograd gives the gradient of its
result. Quiet calls change nothing in the trainer: no metric, no collective, no step of the entropy controller. The
reporting call is the one that TRL would have made.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class LossInputs:
    """What `compute_loss` asks the model for, given to it instead.

    Attributes:
        log_probs, entropies (`[B, T]`, fp32): of the completions; inside `compute_loss` they are leaves.
        aux_loss (`[]`, fp32): the router's auxiliary loss, without gradient.
        entropy_mask (`[B, T]`, bool, *optional*): tokens above the entropy quantile, when that option is on.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor
    aux_loss: torch.Tensor
    entropy_mask: torch.Tensor | None = None


@dataclass(frozen=True)
class LossGradient:
    """`compute_loss` of one stock micro-batch and its gradient.

    Attributes:
        loss (`[]`): the loss, detached, scaled for gradient accumulation.
        log_probs (`[B, T]`, fp32): its gradient with respect to the log-probs.
        entropies (`[B, T]`, fp32, or `None`): with respect to the entropies; `None` where the loss does not read them.
    """

    loss: torch.Tensor
    log_probs: torch.Tensor
    entropies: torch.Tensor | None


class LossOracle:
    """Runs a trainer's `compute_loss` on given log-probs.

    Args:
        trainer: a [`~trl.GRPOTrainer`] whose `_get_per_token_logps_and_entropies` returns `oracle.given` when it is
            set.

    Attributes:
        given ([`LossInputs`] or `None`): set while `compute_loss` runs here, None at all other times.
    """

    def __init__(self, trainer):
        self._trainer = trainer
        self.given: LossInputs | None = None

    def gradient(self, model, inputs: dict[str, Any], given: LossInputs) -> LossGradient:
        """The gradient, and no trace in the trainer."""
        with self._quiet():
            return self._run(model, inputs, given)

    def report(self, model, inputs: dict[str, Any], given: LossInputs) -> LossGradient:
        """The call TRL would have made: metrics, collectives and the entropy controller are its own."""
        return self._run(model, inputs, given)

    def _run(self, model, inputs: dict[str, Any], given: LossInputs) -> LossGradient:
        trainer = self._trainer
        log_probs = given.log_probs.detach().requires_grad_()
        entropies = given.entropies.detach().requires_grad_()
        self.given = LossInputs(log_probs, entropies, given.aux_loss, given.entropy_mask)
        try:
            with torch.enable_grad(), trainer.compute_loss_context_manager():
                loss = trainer.compute_loss(model, inputs)  # a subclass may override it
        finally:
            self.given = None
        if not trainer.loss_is_scaled_for_ga:
            loss = loss / trainer.current_gradient_accumulation_steps
        gradients = torch.autograd.grad(loss, [log_probs, entropies], allow_unused=True)
        of_log_probs = torch.zeros_like(log_probs) if gradients[0] is None else gradients[0]
        return LossGradient(loss.detach(), of_log_probs, gradients[1])

    @contextlib.contextmanager
    def _quiet(self) -> Iterator[None]:
        trainer = self._trainer
        kept = (trainer.accelerator, trainer._metrics, trainer._entropy_window_stats)
        trainer.accelerator = _QuietAccelerator(trainer.accelerator)
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        try:
            yield
        finally:
            trainer.accelerator, trainer._metrics, trainer._entropy_window_stats = kept


class _QuietAccelerator:
    """An accelerator without collectives: what a rank computes for itself stays with it."""

    sync_gradients = False  # `compute_loss` steps the adaptive entropy controller only when gradients synchronise
    is_main_process = False  # TRL's profiler logs each call of `compute_loss` there

    def __init__(self, accelerator):
        self._accelerator = accelerator

    def __getattr__(self, name):
        return getattr(self._accelerator, name)

    def gather(self, tensor):
        return tensor

    def gather_for_metrics(self, tensor):
        return tensor

    def reduce(self, tensor, reduction="sum"):
        return tensor

    def pad_across_processes(self, tensor, **kwargs):
        return tensor
