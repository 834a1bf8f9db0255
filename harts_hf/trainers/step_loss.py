"""The loss of one planned step: TRL's own for each microbatch, and once more for loss and metrics."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from trl.trainer.grpo_trainer import GRPOTrainer

from harts_hf.execution import MicrobatchResult
from harts_hf.models.routing import RouterSums, load_balancing_loss

from .loss_oracle import LossOracle
from .micro_batches import placements, router_sums_of, splits_a_micro_batch
from .planned_step import PlannedStep
from .step_state import StepState


class StepLoss:
    """TRL's loss of one planned step, for its microbatches as they run and for all of them at the end.

    Making one, [`StepLoss.pre_pass`] and [`StepLoss.report`] are collective.

    Args:
        trainer: whose loss it is; its options say what the loss reads.
        oracle: runs that trainer's loss.
        model: as `training_step` has it, for `_compute_loss`.
        config: the model's text config; `num_experts_per_tok` is read where there is an auxiliary loss.
        step: the plan and its transfers.
        micro_batches: TRL's inputs of this rank's stock micro-batches.

    Attributes:
        needs_pre_pass (`bool`): the entropy quantile or the router's token fractions couple trajectories of different
            microbatches, so that [`StepLoss.pre_pass`] has to come before any backward.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        oracle: LossOracle,
        model,
        config,
        step: PlannedStep,
        micro_batches: Sequence[dict[str, Any]],
    ):
        self._trainer, self._oracle, self._model, self._config, self._step = trainer, oracle, model, config, step
        self._state = StepState(step.share_micro_batches(micro_batches), step.ranks.device)
        self._masks_by_entropy = trainer.top_entropy_quantile < 1.0
        split_aux = trainer.aux_loss_enabled and splits_a_micro_batch(step.plan, step.trajectories)
        self.needs_pre_pass = self._masks_by_entropy or split_aux

    def pre_pass(self, results: Iterable[MicrobatchResult]) -> None:
        """Learn what couples trajectories of different microbatches from one forward of each.

        Args:
            results: of this rank's microbatches; drawn without a graph.
        """
        trainer, step, state = self._trainer, self._step, self._state
        with torch.no_grad():
            for result in results:
                for m, placement in placements(result.batch, step.trajectories_of(result.microbatch)).items():
                    state.fill(m, placement, result.output)
                if trainer.aux_loss_enabled:
                    state.add_router_sums(self._router_sums(result))
        if trainer.aux_loss_enabled:
            state.sum_router_sums(step.ranks)
        step.send_home(4, state.read, state.write)
        if self._masks_by_entropy:
            masks = []
            for m in step.own_micro_batches:
                inputs = state.micro_batches[m]
                mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
                masks.append(trainer.get_high_entropy_mask(state.entropies[m], mask, 1 - trainer.top_entropy_quantile))
            shared = step.share_micro_batches([{"mask": mask} for mask in masks])
            state.entropy_masks = {m: values["mask"] for m, values in shared.items()}

    def of_microbatch(self, result: MicrobatchResult) -> torch.Tensor:
        """A scalar whose gradient is that of the step's loss through this microbatch; its value is no loss."""
        trainer, state = self._trainer, self._state
        places = placements(result.batch, self._step.trajectories_of(result.microbatch))
        log_probs, entropies = result.output.log_probs, result.output.entropies
        assert entropies is not None  # every forward of a step asks for them
        scores = len(log_probs)
        total = log_probs[:0].sum()  # 0, but in the graph even where nothing is scored
        for m, placement in places.items():
            state.fill(m, placement, result.output)
        for m, placement in places.items():
            used = self._oracle.gradient(self._model, state.micro_batches[m], state.loss_inputs(m))
            total = total + (log_probs * placement.gather_gradient(used.log_probs, scores)).sum()
            if used.entropies is not None:
                total = total + (entropies * placement.gather_gradient(used.entropies, scores)).sum()
            state.remember(m, placement, used)
        if trainer.aux_loss_enabled:
            sums = self._router_sums(result)
            if not state.has_totals:
                state.add_router_sums(sums)
            aux = load_balancing_loss(sums, state.totals_for(sums))
            total = total + trainer.router_aux_loss_coef * aux.sum() / trainer.current_gradient_accumulation_steps
        return total

    def report(self) -> torch.Tensor:
        """TRL's own loss once per stock micro-batch of this rank, for loss and metrics: their sum, detached.

        Raises:
            RuntimeError: the loss coupled trajectories; on all ranks if one finds it.
        """
        trainer, step, state = self._trainer, self._step, self._state
        step.send_home(4, state.read, state.write)
        total = torch.zeros((), device=step.ranks.device)
        aux: Sequence[torch.Tensor] = [total] * step.num_micro_batches
        if trainer.aux_loss_enabled:
            if not state.has_totals:
                state.sum_router_sums(step.ranks)
            aux = state.aux_losses()
        gradient_state = trainer.accelerator.gradient_state
        coupling = None
        for m in step.own_micro_batches:
            gradient_state._set_sync_gradients(m == step.own_micro_batches[-1])
            final = self._oracle.report(self._model, state.micro_batches[m], state.loss_inputs(m, aux[m]))
            coupling = coupling or state.coupling(m, final, trainer.loss_type)
            total = total + final.loss
        coupling = next(filter(None, step.ranks.gather_objects(coupling)), None)
        if coupling is not None:
            raise RuntimeError(coupling)
        return total

    def _router_sums(self, result: MicrobatchResult) -> RouterSums:
        placed = self._step.trajectories_of(result.microbatch)
        return router_sums_of(result, placed, self._step.num_micro_batches, self._config.num_experts_per_tok)
