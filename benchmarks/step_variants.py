"""Ways to run the forward, loss and backward of one optimizer step: trajectories apart, padded, or as prefix trees.

All have the loss of GRPO: advantage times log-prob of each scored token, over the step's scored tokens, a shared token
weighed by the trajectories that score it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import torch
from rollout_steps import RolloutStep
from step_work import StepWork
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


class StopStepError(Exception):
    """Raised inside of a step to end it early."""


@dataclass
class StepRun:
    """One pass over a step, or its beginning.

    Attributes:
        seconds (`float`): wall time, device work included.
        marks (`list[float]`): seconds from the start to the end of each microbatch's backward, on the device's clock.
        is_complete (`bool`): all trajectories have run.
        trajectories (`list[int]`): those that have run, in order.
        microbatches (`int`): forwards of trajectories; producers of sharing windows come on top.
        embedded_rows (`int`): rows that went through the embedding, padding included.
        work (`StepWork`): what was computed.
        log_prob_sums (`dict[int, float]`): sum of the scored tokens' log-probs of each trajectory that has run.
    """

    seconds: float = 0.0
    marks: list[float] = field(default_factory=list)
    is_complete: bool = False
    trajectories: list[int] = field(default_factory=list)
    microbatches: int = 0
    embedded_rows: int = 0
    work: StepWork = field(default_factory=StepWork)
    log_prob_sums: dict[int, float] = field(default_factory=dict)


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

        def run(watch: "_Watch") -> None:
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

        def run(watch: "_Watch") -> None:
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
        """Run the stock forward on padded batches, by TRL's own function for log-probs of completions."""
        trainer = SimpleNamespace(accelerator=SimpleNamespace(autocast=contextlib.nullcontext))
        log_probs_of = GRPOTrainer._get_per_token_logps_and_entropies.__wrapped__  # below TRL's profiling context
        indices = list(range(len(self.step.trajectories)))

        def run(watch: "_Watch") -> None:
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

    def _watched(self, run: Callable[["_Watch"], None], **limits) -> StepRun:
        self.model.zero_grad(set_to_none=True)
        watch = _Watch(self.step, self._weights, self.device, **limits)
        hook = self.model.get_input_embeddings().register_forward_pre_hook(watch.count_rows)
        _synchronize(self.device)
        watch.begin()
        try:
            run(watch)
            _synchronize(self.device)
            return watch.finish(is_complete=True)
        except StopStepError:
            _synchronize(self.device)
            return watch.finish(is_complete=False)
        finally:
            hook.remove()


class _Watch:
    """Loss, clock and counts of one pass."""

    def __init__(
        self, step, weights, device, seconds_limit: float = float("inf"), microbatch_limit: int | None = None
    ):
        self._step, self._weights, self._device = step, weights, device
        self._seconds_limit, self._microbatch_limit = seconds_limit, microbatch_limit
        self._run = StepRun()
        self._events: list = []
        self._sums: list[tuple[tuple[int, ...], list[np.ndarray] | None, torch.Tensor]] = []

    def begin(self) -> None:
        self._begin = time.perf_counter()
        self._events.append(self._event())

    def count_rows(self, module, args) -> None:
        self._run.embedded_rows += args[0].numel()

    def loss(self, result: MicrobatchResult) -> torch.Tensor:
        log_probs = result.output.log_probs
        weights = np.zeros(len(log_probs))
        for k, i in enumerate(result.microbatch.trajectories):
            weights[self._scores(result, k, i)] += self._weights[i]
        weights = torch.from_numpy(weights).float()
        if self._device.type == "cuda":  # a copy from pageable memory waits for the forward
            weights = weights.pin_memory()
        return (log_probs * weights.to(self._device, non_blocking=True)).sum()

    def after(self, result: MicrobatchResult) -> None:
        self._run.work.add_batch(result.batch)
        members = result.microbatch.trajectories
        if not members:  # a producer's forward
            return
        scores = [self._scores(result, k, i) for k, i in enumerate(members)]
        self._sums.append((members, scores, result.output.log_probs.detach()))
        self._end_microbatch()

    def after_padded(self, members: list[int], sums: torch.Tensor, scored: int) -> None:
        lengths = np.array([len(self._step.trajectories[i].token_ids) for i in members])
        self._run.work.add_trajectories(lengths, scored)
        self._sums.append((tuple(members), None, sums))
        self._end_microbatch()

    def finish(self, is_complete: bool) -> StepRun:
        run = self._run
        run.seconds = time.perf_counter() - self._begin
        run.marks = [self._seconds_to(event) for event in self._events[1:]]
        run.is_complete = is_complete or len(run.trajectories) == len(self._step.trajectories)
        for members, scores, values in self._sums:
            values = values.double().cpu()
            totals = values if scores is None else [values[torch.from_numpy(at)].sum() for at in scores]
            run.log_prob_sums |= {i: float(total) for i, total in zip(members, totals, strict=True)}
        return run

    def _scores(self, result: MicrobatchResult, k: int, trajectory: int) -> np.ndarray:
        return result.batch.scores(k)[self._step.trajectories[trajectory].scored]

    def _end_microbatch(self) -> None:
        run = self._run
        run.trajectories += self._sums[-1][0]
        run.microbatches += 1
        self._events.append(self._event())
        if run.microbatches == self._microbatch_limit:
            raise StopStepError
        # The one before is waited for, so that the device always has work.
        if len(run.trajectories) < len(self._step.trajectories) and len(self._events) > 2:
            if self._seconds_to(self._events[-2]) > self._seconds_limit:
                raise StopStepError

    def _event(self):
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds_to(self, event) -> float:
        if self._device.type != "cuda":
            return event - self._events[0]
        event.synchronize()
        return self._events[0].elapsed_time(event) / 1e3


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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


def build_batches(plan: StepPlan, step: RolloutStep, device: torch.device) -> float:
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
        batch.chunk_layout()
        batch.conv_layout(4)
    _synchronize(device)
    return time.perf_counter() - begin
