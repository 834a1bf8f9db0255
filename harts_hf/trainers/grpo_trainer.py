"""TreeGRPOTrainer: TRL's GRPOTrainer with every shared prefix computed once."""

import operator
import time
from functools import partial, reduce
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache
from trl.trainer.grpo_trainer import GRPOTrainer

from harts_hf.execution import ForwardOptions, forward_plan, train_plan
from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.checkpoint import reload_weights
from harts_hf.models.dropout import refuse_dropout
from harts_hf.models.enable import enable_tree_forward
from harts_hf.models.fused_modules import fuse_modules
from harts_hf.models.routing import load_balancing_loss

from .grpo_config import TreeGRPOConfig
from .guards import MULTIMODAL_INPUTS, refuse_multimodal, refuse_options
from .loss_oracle import LossOracle
from .micro_batches import PlacedTrajectory, place_trajectories, placements, router_sums_of
from .resume import micro_steps_done, reloads_whole, warn_of_lost_generation
from .step_loss import StepLoss
from .step_planner import StepPlanner
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
        base = causal_lm_of(self.model)
        refuse_dropout(base)
        self._planner = StepPlanner(options, base, self.accelerator.device, self._in_lockstep)
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
        step, _ = self._planner.plan(
            place_trajectories(input_ids, attention_mask, logits_to_keep),
            [(len(input_ids), logits_to_keep)],
            # Every rank calls this at the same time, as TRL gathers around it; a graph cannot leave its rank.
            alone=torch.is_grad_enabled(),
        )
        own, *_ = step.own_micro_batches
        options = self._forward_options(with_entropies=compute_entropy, with_router_logits=compute_aux_loss)
        device = self.accelerator.device
        log_probs = {g: torch.zeros(shape, device=device) for g, shape in step.shapes.items()}
        entropies = {g: torch.zeros(shape, device=device) for g, shape in step.shapes.items()}
        sums = []
        for result in forward_plan(model, step.own_plan, step.trajectories, options, device, step.program):
            placed = step.trajectories_of(result.microbatch)
            for g, placement in placements(result.batch, placed).items():
                log_probs[g] = placement.scatter(result.output.log_probs, log_probs[g])
                if result.output.entropies is not None:
                    entropies[g] = placement.scatter(result.output.entropies, entropies[g])
            if compute_aux_loss:
                top_k = self._text_config.num_experts_per_tok
                sums.append(router_sums_of(result, placed, step.num_micro_batches, top_k))

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
            self._step = micro_steps_done(self)
            warn_of_lost_generation(self, self._step)
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
        step, plan_seconds = self._planner.plan(
            [t for m, inputs in enumerate(micro_batches) for t in self._placed(inputs, m)],
            [tuple(inputs["completion_ids"].shape) for inputs in micro_batches],
            without_unscored=not self.aux_loss_enabled,
        )
        options = self._forward_options(with_entropies=True, with_router_logits=self.aux_loss_enabled)
        run = (model, step.own_plan, step.trajectories, options, self.accelerator.device)
        loss = StepLoss(self, self._oracle, model, self._text_config, step, micro_batches)
        if loss.needs_pre_pass:
            loss.pre_pass(forward_plan(*run, step.program))
        statistics = TreeStatistics(step, plan_seconds)
        if self._in_lockstep:  # a producer that scores nothing leaves parameters without a gradient on its rank alone
            model.set_reduce_scatter_unused_params(True)
        train_plan(
            *run,
            loss=loss.of_microbatch,
            backward=self.accelerator.backward,
            # Accelerate did not wrap a model that Transformers sharded, so its `no_sync` does nothing.
            defer_sync=self._defer_fsdp_gradient_reduction
            if self.is_distributed_loading_by_transformers
            else partial(self.accelerator.no_sync, model),
            after=statistics.add,
            needs_synced_forward=self.accelerator.num_processes > 1 and not self._in_lockstep,
            program=step.program,
        )
        total = loss.report()
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

    # ---- checkpoints

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        model = self.model if model is None else model
        if reloads_whole(self, model):
            reload_weights(model, resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self):
        if reloads_whole(self, self.model):
            assert self.state.best_model_checkpoint is not None  # else Trainer does not call this
            reload_weights(self.model, self.state.best_model_checkpoint)
        else:
            super()._load_best_model()

    # ---- pieces

    @property
    def _text_config(self):
        return causal_lm_of(self.accelerator.unwrap_model(self.model)).config.get_text_config()

    @property
    def _in_lockstep(self) -> bool:
        """Whether forwards and backwards have collectives inside, so that ranks must run the same ones."""
        is_sharded = self.accelerator.is_fsdp2 or self.is_distributed_loading_by_transformers
        return is_sharded and self.accelerator.num_processes > 1

    def _forward_options(self, with_entropies: bool, with_router_logits: bool) -> ForwardOptions:
        return ForwardOptions(
            temperature=self.temperature,
            with_entropies=with_entropies,
            with_router_logits=with_router_logits,
            head_in_fp32=self.args.cast_lm_head_to_fp32,
            autocast=self.accelerator.autocast,
            offload_producers=self._tree_options.offload_producers,
        )
