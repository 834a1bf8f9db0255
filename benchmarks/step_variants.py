"""Ways to run the forward, loss and backward of one optimizer step: trajectories apart, padded, or as prefix trees.

All have the loss of GRPO: advantage times log-prob of each scored token, over the step's scored tokens, a shared token
weighed by the trajectories that score it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import torch
from rollout_steps import RolloutStep
from step_run import StepRun, StepWatch, StopStepError, synchronize
from transformers import PreTrainedModel
from trl import GRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from harts_hf import disable_tree_forward, enable_tree_forward
from harts_hf.batch import CompactBatch
from harts_hf.boundary import Boundary
from harts_hf.execution import ForwardOptions, MicrobatchResult, train_plan
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.tree import PrefixTree
from harts_hf.window_batches import WindowBatches

OPTIONS = ForwardOptions(with_entropies=False)


class StepRunner:
    """Runs passes over one step with one model.

    Args:
        model: on the device, in training mode.
        step: what to train.

    The methods that run a pass take `seconds_limit` and `microbatch_limit`: it ends after the microbatch that reaches
    one of these.
    """

    def __init__(self, model: PreTrainedModel, step: RolloutStep):
        self.model, self.step = model, step
        self.device = model.device
        self._weights = -step.advantages / step.num_scored

    def loss_of(self, log_prob_sums: dict[int, float]) -> float:
        """Part of the loss that these trajectories make."""
        return sum(float(self._weights[i]) * total for i, total in log_prob_sums.items())

    def trees(self, plan: StepPlan, **limits) -> StepRun:
        """Run a plan with the model's tree forward."""

        def run(watch: StepWatch) -> None:
            train_plan(
                self.model,
                plan,
                self.step.trajectories,
                OPTIONS,
                self.device,
                loss=watch.loss,
                backward=torch.Tensor.backward,
                defer_sync=contextlib.nullcontext,
                after=watch.after,
            )

        return self._watched(run, **limits)

    def packed(self, bins: list[list[int]], **limits) -> StepRun:
        """Run trajectories apart, several in a microbatch, with the same model code as trees."""

        def run(watch: StepWatch) -> None:
            for members in bins:
                own = [self.step.trajectories[i] for i in members]
                forest = PrefixTree.without_sharing([t.token_ids for t in own])
                batch = CompactBatch(forest, [t.scored for t in own], self.device)
                output = self.model(harts_batch=batch, with_entropies=False)
                result = MicrobatchResult(Microbatch(tuple(members), batch.num_rows), batch, output)
                del output
                watch.loss(result).backward()
                watch.after(result)

        return self._watched(run, **limits)

    def padded(self, batch_size: int, **limits) -> StepRun:
        """Run the stock forward on padded batches, by TRL's own function for log-probs of completions.

        Trajectories are shuffled, as TRL does, always in the same way.
        """
        trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))
        log_probs_of = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__  # below TRL's profiling context
        indices = np.random.default_rng(0).permutation(len(self.step.trajectories)).tolist()

        def run(watch: StepWatch) -> None:
            for first in range(0, len(indices), batch_size):
                members = indices[first : first + batch_size]
                ids, mask, scored, width = self._pad(members)
                log_probs, _, _ = log_probs_of(trainer, self.model, ids, mask, logits_to_keep=width)
                weights = torch.tensor(self._weights[members], dtype=torch.float32, device=self.device)
                (log_probs * scored * weights[:, None]).sum().backward()
                watch.after_padded(members, (log_probs.detach() * scored).sum(1), int(scored.sum()))

        with _stock_forward(self.model):
            return self._watched(run, **limits)

    def _pad(self, members: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Prompts on the left and completions on the right, as TRL pads them: ids, mask, scored completion tokens and
        width of the completions."""
        own = [self.step.trajectories[i] for i in members]
        prompts = [int(np.flatnonzero(t.scored)[0]) for t in own]
        completion = max(len(t.token_ids) - prompt for t, prompt in zip(own, prompts, strict=True))
        shape = len(own), max(prompts) + completion
        ids, mask, scored = np.zeros(shape, np.int64), np.zeros(shape, np.int64), np.zeros(shape, np.float32)
        for k, (trajectory, prompt) in enumerate(zip(own, prompts, strict=True)):
            place = slice(max(prompts) - prompt, max(prompts) - prompt + len(trajectory.token_ids))
            ids[k, place], mask[k, place], scored[k, place] = trajectory.token_ids, 1, trajectory.scored
        ids, mask, scored = (torch.from_numpy(x).to(self.device) for x in (ids, mask, scored))
        return ids, mask, scored[:, -completion:], completion

    def _watched(self, run: Callable[[StepWatch], None], **limits) -> StepRun:
        self.model.zero_grad(set_to_none=True)
        watch = StepWatch(self.step, self._weights, self.device, **limits)
        hook = self.model.get_input_embeddings().register_forward_pre_hook(watch.count_rows)
        synchronize(self.device)
        watch.begin()
        try:
            run(watch)
            synchronize(self.device)
            return watch.finish(is_complete=True)
        except StopStepError:
            synchronize(self.device)
            return watch.finish(is_complete=False)
        finally:
            hook.remove()


@contextlib.contextmanager
def tree_forward(model: PreTrainedModel, linear_attention: str | None, attention: str | None) -> Iterator[None]:
    """The model with a tree forward of these implementations."""
    enable_tree_forward(model, linear_attention=linear_attention, attention=attention)
    try:
        yield
    finally:
        disable_tree_forward(model)


@contextlib.contextmanager
def _stock_forward(model: PreTrainedModel) -> Iterator[None]:
    """The stock model with TRL's fused head, as `GRPOTrainer` sets it up."""
    add_fused_lm_head(model, outputs=("log_probs",))
    try:
        yield
    finally:
        del model.forward  # of the instance


def pack(lengths: list[int], max_rows: int) -> list[list[int]]:
    """First-fit decreasing: trajectories whose lengths add up to at most `max_rows`; a longer one runs alone."""
    bins: list[list[int]] = []
    free: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, room in enumerate(free) if room >= lengths[i]), None)
        if place is None:
            bins.append([])
            free.append(max_rows)
            place = len(bins) - 1
        bins[place].append(i)
        free[place] -= lengths[i]
    return bins


# Implementation of linear attention -> the tables that it takes from a layout; others take the layout alone.
_TABLES = {
    "tree": lambda layout: layout.sequences,
    "rounds": lambda layout: layout.packed_calls,
    "nodewise": lambda layout: layout.node_calls,
}


def build_batches(plan: StepPlan, step: RolloutStep, device: torch.device, linear_attention: str | None) -> float:
    """Seconds that the trees of a plan and their tables for linear attention and convolution take to build.

    The same is done inside of each pass, where it runs beside the device's work.
    """
    begin = time.perf_counter()
    batches = WindowBatches(plan, step.trajectories, device)
    boundaries: list[Boundary] = []
    made = []
    for number, window in enumerate(plan.windows):  # a window comes after the one around it
        source = None if window.parent is None else boundaries[window.parent]
        boundaries.append(Boundary(window.prefix_tokens, source))
        made.append(batches.of_producer(number, source, boundaries[number]))
    for microbatch in plan.microbatches:
        source = None if microbatch.window is None else boundaries[microbatch.window]
        made.append(batches.of_microbatch(microbatch, source))
    for batch in made:
        _TABLES.get(linear_attention, lambda layout: layout)(batch.chunk_layout())
        batch.conv_layout(4)
    synchronize(device)
    return time.perf_counter() - begin
