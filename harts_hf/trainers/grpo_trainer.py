"""TreeGRPOTrainer: TRL's GRPOTrainer with every shared prefix computed once."""

import math
import operator
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from transformers import PreTrainedModel
from transformers.trainer_utils import has_length
from trl.trainer.grpo_trainer import GRPOTrainer

from harts_hf.distributed.ranks import Ranks
from harts_hf.execution import ForwardOptions, MicrobatchResult, forward_plan, train_plan
from harts_hf.forward import check_token_ids
from harts_hf.models.checkpoint import reload_weights
from harts_hf.models.enable import causal_lm_of, enable_tree_forward, refuse_dropout
from harts_hf.models.fused_modules import fuse_modules
from harts_hf.models.routing import RouterSums, load_balancing_loss, router_sums
from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.window_memory import WindowMemory
from harts_hf.tree import PrefixTree

from .grpo_config import WINDOW_COST_ROWS, TreeGRPOConfig
from .guards import MULTIMODAL_INPUTS, refuse_multimodal, refuse_options
from .loss_oracle import LossOracle
from .micro_batches import PlacedTrajectory, group_weights, place_trajectories, placements, splits_a_micro_batch
from .planned_step import PlannedStep, share_trajectories
from .step_state import StepState
from .step_statistics import TreeStatistics
from .trajectories import TrajectoryDatasetMixin


class TreeGRPOTrainer(TrajectoryDatasetMixin, GRPOTrainer):
    """
    Trainer for Group Relative Policy Optimization over prefix trees. A drop-in for [`~trl.GRPOTrainer`].

    Each optimizer step is planned as a whole: the trajectories of all its gradient-accumulation steps form prefix
    trees, each distinct prefix is computed once, forward and backward, and the loss is TRL's own. Gradients, loss and
    metrics are those of the stock trainer up to rounding. Prefixes are found in the token ids, so any source of
    rollouts works.

    Args:
        model, reward_funcs, args, train_dataset, eval_dataset, processing_class, and all others:
            as for [`~trl.GRPOTrainer`]. `args` may be a plain [`~trl.GRPOConfig`]; the options of [`TreeGRPOConfig`]
            then have their defaults. With a dataset of finished trajectories (see [`TrajectoryDatasetMixin`])
            `reward_funcs` is not needed and nothing is generated.

    Raises:
        UnsupportedModelError: the model has no tree forward, or a dropout above zero.
        ValueError, NotImplementedError: an option that a tree cannot honour (DeepSpeed, `torch_compile`, images,
            a fused-backward optimizer); the message says what to do.
    """

    _tag_names = ["trl", "grpo", "harts"]
    _name = "Tree GRPO"

    def __init__(
        self,
        model,
        reward_funcs=None,
        args=None,
        train_dataset=None,
        eval_dataset=None,
        processing_class=None,
        reward_processing_classes=None,
        callbacks=None,
        optimizers=(None, None),
        quantization_config=None,
        peft_config=None,
        tools=None,
        rollout_func=None,
        environment_factory=None,
    ):
        super().__init__(
            model,
            reward_funcs,
            args,
            train_dataset,
            eval_dataset,
            processing_class=processing_class,
            reward_processing_classes=reward_processing_classes,
            callbacks=callbacks,
            optimizers=optimizers,
            quantization_config=quantization_config,
            peft_config=peft_config,
            tools=tools,
            rollout_func=rollout_func,
            environment_factory=environment_factory,
        )
        # A plain GRPOConfig has none of these options: the class holds their defaults.
        self._tree_options = self.args if isinstance(self.args, TreeGRPOConfig) else TreeGRPOConfig
        options = self._tree_options
        refuse_options(self, options.sharing_windows, options.exchange_trajectories)
        models = [self.model]
        if self.ref_model is not None:
            models.append(self.accelerator.unwrap_model(self.ref_model))
        for model in models:
            enable_tree_forward(model)
            if options.fused_modules:
                fuse_modules(model)
        refuse_dropout(causal_lm_of(self.model))
        self._window_memory = self._bound_windows()
        self._oracle = LossOracle(self)
        self.expert_loads: torch.Tensor | None = None  # of the last optimizer step and this process, [L, E]
        self._micro_batches: list[dict[str, Any]] = []  # the stock micro-batches of the optimizer step at hand

    # ---- log-probs: old policy, reference, evaluation

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids,
        attention_mask,
        logits_to_keep,
        batch_size=None,  # the stock way to bound memory; a tree forward is bounded by max_tokens_per_microbatch
        compute_entropy=False,
        compute_aux_loss=False,
        **multimodal,
    ):
        given = self._oracle.given
        if given is not None:
            return given.log_probs, given.entropies, given.aux_loss
        refuse_multimodal(multimodal)
        step, _ = self._plan_step(
            place_trajectories(input_ids, attention_mask, logits_to_keep),
            [(len(input_ids), logits_to_keep)],
            # Every rank calls this at the same time, as TRL gathers around it; a graph cannot leave its rank.
            ranks=self._ranks(alone=torch.is_grad_enabled()),
        )
        own, *_ = step.own_micro_batches
        options = self._forward_options(with_entropies=compute_entropy, with_router_logits=compute_aux_loss)
        device = self.accelerator.device
        log_probs = {g: torch.zeros(shape, device=device) for g, shape in step.shapes.items()}
        entropies = {g: torch.zeros(shape, device=device) for g, shape in step.shapes.items()}
        sums = []
        for result in forward_plan(model, step.own_plan, step.trajectories, options, device, step.program):
            placed = [step.trajectories[i] for i in result.microbatch.trajectories]
            for g, placement in placements(result.batch, placed).items():
                log_probs[g] = placement.scatter(result.output.log_probs, log_probs[g])
                if result.output.entropies is not None:
                    entropies[g] = placement.scatter(result.output.entropies, entropies[g])
            if compute_aux_loss:
                sums.append(self._router_sums(result, placed, step.num_micro_batches))

        def read(g, rows, columns):
            return torch.stack([log_probs[g][rows, columns], entropies[g][rows, columns]])

        def write(g, rows, columns, values):
            log_probs[g][rows, columns], entropies[g][rows, columns] = values

        step.send_home(2, read, write)
        aux_loss = None
        if compute_aux_loss:
            totals = reduce(operator.add, sums).map(step.ranks.sum)
            aux_loss = load_balancing_loss(totals, totals)[own]
        return log_probs[own], entropies[own] if compute_entropy else None, aux_loss

    def get_high_entropy_mask(self, entropies, mask, threshold):
        given = self._oracle.given
        if given is not None and given.entropy_mask is not None:
            return given.entropy_mask
        return super().get_high_entropy_mask(entropies, mask, threshold)

    # ---- training: one plan per optimizer step

    def get_batch_samples(self, epoch_iterator, num_batches, device):
        # Called once per optimizer step. What an interrupted step left behind must not join the next one.
        self._micro_batches = []
        return super().get_batch_samples(epoch_iterator, num_batches, device)

    def training_step(self, model, inputs, num_items_in_batch):
        time_before = time.perf_counter()
        if self._step == 0 and self.state.global_step > 0:
            # Resumed: TRL counts from 0, which would shift the phase between generation and optimizer steps.
            self._step = self._micro_steps_done()
            self._warn_of_lost_generation()
        model.train()
        optimizer_train = getattr(self.optimizer, "train", None)
        if callable(optimizer_train):  # schedule-free optimizers
            optimizer_train()
        self._micro_batches.append(self._prepare_inputs(inputs))
        loss = torch.zeros((), device=self.accelerator.device)
        is_last = len(self._micro_batches) == self.current_gradient_accumulation_steps
        if is_last:
            micro_batches, self._micro_batches = self._micro_batches, []
            try:
                loss = self._run_step(model, micro_batches)
            except BaseException:
                model.zero_grad()  # no half gradient is left behind
                raise
            empty_cache_steps = self.args.torch_empty_cache_steps
            if empty_cache_steps is not None and self.state.global_step % empty_cache_steps == 0:
                clear_device_cache()
        self._step += 1
        self._current_train_step_time += time.perf_counter() - time_before
        if is_last:
            self._metrics["train"]["step_time"].append(self._current_train_step_time)
            self._current_train_step_time = 0.0
        return loss

    def _run_step(self, model, micro_batches: list[dict[str, Any]]) -> torch.Tensor:
        """Forward, backward and reporting of one optimizer step. Returns its loss, detached."""
        device = self.accelerator.device
        step, plan_seconds = self._plan_step(
            [t for m, inputs in enumerate(micro_batches) for t in self._placed(inputs, m)],
            [tuple(inputs["completion_ids"].shape) for inputs in micro_batches],
            ranks=self._ranks(),
            without_unscored=not self.aux_loss_enabled,
        )
        state = StepState(step.share_micro_batches(micro_batches), device)
        options = self._forward_options(with_entropies=True, with_router_logits=self.aux_loss_enabled)
        statistics = TreeStatistics(step, plan_seconds)
        split_aux = self.aux_loss_enabled and splits_a_micro_batch(step.plan, step.trajectories)
        if self.top_entropy_quantile < 1.0 or split_aux:
            self._pre_pass(model, step, options, state)

        def loss(result: MicrobatchResult) -> torch.Tensor:
            placed = [step.trajectories[i] for i in result.microbatch.trajectories]
            places = placements(result.batch, placed)
            log_probs, entropies = result.output.log_probs, result.output.entropies
            assert entropies is not None  # asked for in the options above
            scores = len(log_probs)
            total = log_probs[:0].sum()  # 0, but in the graph even where nothing is scored
            for m, placement in places.items():
                state.fill(m, placement, result.output)
            for m, placement in places.items():
                used = self._oracle.gradient(model, state.micro_batches[m], state.loss_inputs(m))
                total = total + (log_probs * placement.gather_gradient(used.log_probs, scores)).sum()
                if used.entropies is not None:
                    total = total + (entropies * placement.gather_gradient(used.entropies, scores)).sum()
                state.remember(m, placement, used)
            if self.aux_loss_enabled:
                sums = self._router_sums(result, placed, step.num_micro_batches)
                if not state.has_totals:
                    state.add_router_sums(sums)
                aux = load_balancing_loss(sums, state.totals_for(sums))
                total = total + self.router_aux_loss_coef * aux.sum() / self.current_gradient_accumulation_steps
            return total

        if self._in_lockstep:  # a producer that scores nothing leaves parameters without a gradient on its rank alone
            model.set_reduce_scatter_unused_params(True)
        train_plan(
            model,
            step.own_plan,
            step.trajectories,
            options,
            device,
            loss=loss,
            backward=self.accelerator.backward,
            # Accelerate did not wrap a model that Transformers sharded, so its `no_sync` does nothing.
            defer_sync=self._defer_fsdp_gradient_reduction
            if self.is_distributed_loading_by_transformers
            else partial(self.accelerator.no_sync, model),
            after=statistics.add,
            needs_synced_forward=self.accelerator.num_processes > 1 and not self._in_lockstep,
            program=step.program,
        )
        step.send_home(4, state.read, state.write)
        total = self._report(model, step, state)
        statistics.log(self._metrics["train"])
        self.expert_loads = statistics.expert_loads
        return total

    def _placed(self, inputs: dict[str, Any], micro_batch: int) -> list[PlacedTrajectory]:
        """The trajectories of one stock micro-batch, with the tokens that its loss reads."""
        refuse_multimodal({name: inputs.get(name) for name in MULTIMODAL_INPUTS})
        return place_trajectories(
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].shape[1],
            loss_mask=inputs.get("tool_mask"),
            micro_batch=micro_batch,
        )

    def _pre_pass(self, model, step: PlannedStep, options: ForwardOptions, state: StepState) -> None:
        """One forward without graph, for what couples trajectories of different microbatches: the entropy quantile and
        the router's token fractions."""
        with torch.no_grad():
            device = self.accelerator.device
            for result in forward_plan(model, step.own_plan, step.trajectories, options, device, step.program):
                placed = [step.trajectories[i] for i in result.microbatch.trajectories]
                for m, placement in placements(result.batch, placed).items():
                    state.fill(m, placement, result.output)
                if self.aux_loss_enabled:
                    state.add_router_sums(self._router_sums(result, placed, step.num_micro_batches))
        if self.aux_loss_enabled:
            state.sum_router_sums(step.ranks)
        step.send_home(4, state.read, state.write)
        if self.top_entropy_quantile < 1.0:
            masks = []
            for m in step.own_micro_batches:
                inputs = state.micro_batches[m]
                mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
                masks.append(super().get_high_entropy_mask(state.entropies[m], mask, 1 - self.top_entropy_quantile))
            shared = step.share_micro_batches([{"mask": mask} for mask in masks])
            state.entropy_masks = {m: values["mask"] for m, values in shared.items()}

    def _report(self, model, step: PlannedStep, state: StepState) -> torch.Tensor:
        """TRL's own loss once per stock micro-batch of this rank, for loss and metrics.

        Refuses a loss that coupled trajectories, on all ranks if one finds it.
        """
        total = torch.zeros((), device=self.accelerator.device)
        aux: Sequence[torch.Tensor] = [total] * step.num_micro_batches
        if self.aux_loss_enabled:
            if not state.has_totals:
                state.sum_router_sums(step.ranks)
            aux = state.aux_losses()
        gradient_state = self.accelerator.gradient_state
        coupling = None
        for m in step.own_micro_batches:
            gradient_state._set_sync_gradients(m == step.own_micro_batches[-1])
            final = self._oracle.report(model, state.micro_batches[m], state.loss_inputs(m, aux[m]))
            coupling = coupling or state.coupling(m, final, self.loss_type)
            total = total + final.loss
        coupling = next(filter(None, step.ranks.gather_objects(coupling)), None)
        if coupling is not None:
            raise RuntimeError(coupling)
        return total

    # ---- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if not self._reloads_whole(model):  # PEFT loads its adapters, FSDP its shards
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            reload_weights(model, resume_from_checkpoint)

    def _load_best_model(self):
        if not self._reloads_whole(self.model):
            super()._load_best_model()
        else:
            assert self.state.best_model_checkpoint is not None  # else Trainer does not call this
            reload_weights(self.model, self.state.best_model_checkpoint)

    def _reloads_whole(self, model) -> bool:
        """Whether a checkpoint's weights are put into the model here, all of them on each process."""
        if self.is_distributed_loading_by_transformers:
            raise NotImplementedError(
                "a model that was sharded while it was loaded cannot take a checkpoint's weights: give the checkpoint "
                "to load_sharded, and leave resume_from_checkpoint and load_best_model_at_end out"
            )
        return isinstance(model, PreTrainedModel) and not self.is_fsdp_enabled

    # ---- pieces

    @property
    def _text_config(self):
        return causal_lm_of(self.accelerator.unwrap_model(self.model)).config.get_text_config()

    @property
    def _in_lockstep(self) -> bool:
        """Whether forwards and backwards have collectives inside, so that ranks must run the same ones."""
        is_sharded = self.accelerator.is_fsdp2 or self.is_distributed_loading_by_transformers
        return is_sharded and self.accelerator.num_processes > 1

    def _ranks(self, alone: bool = False) -> Ranks:
        """The ranks that plan together."""
        return Ranks(self.accelerator.device, alone=alone or not self._tree_options.exchange_trajectories)

    def _plan_step(
        self,
        placed: Sequence[PlacedTrajectory],
        shapes: Sequence[tuple[int, int]],
        *,
        ranks: Ranks,
        without_unscored: bool = False,
    ) -> tuple[PlannedStep, float]:
        """Plan the trajectories of all ranks, and the seconds that took. Collective.

        Args:
            placed, shapes: of this rank, as for `share_trajectories`.
            without_unscored: leave out what trains nothing, unless that is all.
        """
        shared = share_trajectories(ranks, placed, shapes)
        plan_start = time.perf_counter()
        scored = [t for t in shared.trajectories if t.scored.any()]
        if without_unscored and scored:
            shared = replace(shared, trajectories=scored)
        tree = PrefixTree.from_sequences([t.token_ids for t in shared.trajectories])
        check_token_ids(tree, self._text_config)
        options = self._tree_options
        window_cost = options.window_cost_rows
        if window_cost is None:
            window_cost = WINDOW_COST_ROWS.get(self.accelerator.device.type, 0)
        plan = plan_step(
            tree,
            options.max_tokens_per_microbatch,
            num_replicas=ranks.size,
            windows=options.sharing_windows,
            cost=CostModel(producer=window_cost),
            window_memory=self._window_memory,
        )
        return PlannedStep(ranks, shared, plan, self._in_lockstep), time.perf_counter() - plan_start

    def _bound_windows(self) -> WindowMemory | None:
        """What a sharing window may keep alive on the device; None for no bound."""
        options = self._tree_options
        if options.max_window_gib is None:
            return None
        model = causal_lm_of(self.model)
        return WindowMemory.from_config(
            model.config.get_text_config(),
            int(options.max_window_gib * 2**30),
            dtype_bytes=model.dtype.itemsize,
            checkpoints=not options.offload_producers,
        )

    def _micro_steps_done(self) -> int:
        """Micro-steps before `state.global_step`; the last optimizer step of an epoch may have fewer than others."""
        accumulation = self.args.gradient_accumulation_steps
        dataloader = self.callback_handler.train_dataloader
        if not has_length(dataloader):
            return self.state.global_step * accumulation
        epochs, steps = divmod(self.state.global_step, math.ceil(len(dataloader) / accumulation))
        return epochs * len(dataloader) + steps * accumulation

    def _warn_of_lost_generation(self) -> None:
        """A checkpoint does not hold the samples and old log-probs of a generation batch that is still in use."""
        has_old = "old_log_probs" in (getattr(self.train_dataset, "column_names", None) or ())
        generate_every = self.args.steps_per_generation * self.num_iterations
        if self._step % generate_every and not has_old:
            warnings.warn(
                f"resumed inside a generation batch, which serves {generate_every} micro-steps: its samples and old "
                "log-probs are made anew with the resumed policy, so the run differs from an uninterrupted one. Save "
                "where generation starts to avoid it.",
                stacklevel=3,
            )

    def _forward_options(self, with_entropies: bool, with_router_logits: bool) -> ForwardOptions:
        return ForwardOptions(
            temperature=self.temperature,
            with_entropies=with_entropies,
            with_router_logits=with_router_logits,
            head_in_fp32=self.args.cast_lm_head_to_fp32,
            autocast=self.accelerator.autocast,
            offload_producers=self._tree_options.offload_producers,
        )

    def _router_sums(
        self, result: MicrobatchResult, placed: Sequence[PlacedTrajectory], num_micro_batches: int
    ) -> RouterSums:
        weights = group_weights(result.batch, placed, num_micro_batches)
        assert result.output.router_logits is not None  # asked for wherever sums are
        return router_sums(result.output.router_logits, weights, self._text_config.num_experts_per_tok)
