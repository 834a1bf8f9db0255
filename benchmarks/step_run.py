"""One pass over a step: its clock, its loss and what it computed."""

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from step_work import StepWork

from harts_hf.execution import MicrobatchResult


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


class StepWatch:
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
        self._end_microbatch(waits=True)

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

    def _end_microbatch(self, waits: bool = False) -> None:
        run = self._run
        run.trajectories += self._sums[-1][0]
        run.microbatches += 1
        self._events.append(self._event())
        if run.microbatches == self._microbatch_limit:
            raise StopStepError
        # Unless a microbatch takes seconds, the one before is waited for, so that the device always has work.
        ended = self._events[-1 if waits else -2]
        if len(run.trajectories) < len(self._step.trajectories) and self._seconds_to(ended) > self._seconds_limit:
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


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
