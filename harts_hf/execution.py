"""Run a StepPlan on one replica: a forward per microbatch, and a backward where a loss is given.

A sharing window's producer runs before its first consumer. Its consumers start from its boundary, whose tensors are
leaves; the producer runs backward after its last consumer, and nothing of it is kept.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harts_hf.batch import CompactBatch
from harts_hf.boundary import Boundary
from harts_hf.models.enable import TreeOutput
from harts_hf.planning.consumer_tree import filler_tree
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.window_batches import Trajectory, WindowBatches

Context = Callable[[], contextlib.AbstractContextManager]


@dataclass(frozen=True)
class ForwardOptions:
    """How a model is called for a compact batch.

    Attributes:
        temperature (`float`): the logits are divided by it.
        with_entropies, with_router_logits (`bool`): what the output holds beside log-probs.
        head_in_fp32 (`bool`): project to the vocabulary in fp32 whatever the model's dtype and autocast.
        autocast: a function that returns the context of the forward.
        offload_producers (`bool`): keep what a producer's backward needs, apart from its boundary, in host memory
            while its consumers run. With activation recomputation these are the layers' inputs.
    """

    temperature: float = 1.0
    with_entropies: bool = True
    with_router_logits: bool = False
    head_in_fp32: bool = False
    autocast: Context = contextlib.nullcontext
    offload_producers: bool = False


@dataclass(frozen=True)
class MicrobatchResult:
    """One microbatch's forward, or that of a window's producer.

    Attributes:
        microbatch ([`Microbatch`]): the plan's entry; for a producer, and for two rows that stand for nothing, one
            without trajectories.
        batch ([`CompactBatch`]): its tensors; trajectory `i` of the batch is `microbatch.trajectories[i]` of the step.
        output ([`TreeOutput`]): what the model returned for them. A consumer's holds its window's prefix too.
    """

    microbatch: Microbatch
    batch: CompactBatch
    output: TreeOutput


def forward_plan(
    model, plan: StepPlan, trajectories: Sequence[Trajectory], options: ForwardOptions, device: torch.device
) -> Iterator[MicrobatchResult]:
    """Forward each microbatch of the plan's only replica, in order.

    A plan without microbatches runs one forward of two rows that stand for no trajectory, so that a replica with
    nothing to run makes the calls that others wait for; its result goes the way of a microbatch's.

    The caller decides about gradients. A result and its graph live as long as the caller keeps the result; results of
    one window share the producer's graph, so one backward has to serve all of them.

    Args:
        model: a causal LM with a tree forward, as is or wrapped by PEFT or DDP.
        plan: a plan for one replica, of indices into `trajectories`.
        trajectories: the step's trajectories.
        options: how the model is called.
        device: where the model's inputs live.
    """
    run = _PlanRun(model, plan, trajectories, options, device, is_detached=False)
    if not plan.slots:
        yield run.forward_filler()
    for slot, microbatch in enumerate(plan.microbatches):
        for window in run.windows_to_open(microbatch):
            run.produce(window)
        yield run.forward(microbatch)  # no name here keeps it alive
        for window in run.windows_to_close(microbatch, slot):
            boundary = run.boundaries.pop(window)
            if not torch.is_grad_enabled():  # else a recomputation of its consumers reads it again
                boundary.free()


def train_plan(
    model,
    plan: StepPlan,
    trajectories: Sequence[Trajectory],
    options: ForwardOptions,
    device: torch.device,
    *,
    loss: Callable[[MicrobatchResult], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    defer_sync: Context,
    after: Callable[[MicrobatchResult], None],
    needs_synced_forward: bool = False,
) -> None:
    """Forward and backward each microbatch of the plan's only replica; gradients add up in the parameters.

    A plan without microbatches runs one forward and backward of two rows that stand for no trajectory. `loss` has to
    give a 0 for them that is in the graph.

    An exception leaves the gradients of what has run: the caller drops them. Boundaries are freed.

    Args:
        model, plan, trajectories, options, device: as for [`forward_plan`].
        loss: a microbatch's result -> the scalar whose gradient is wanted. The sum over microbatches is the step's
            loss.
        backward: runs the backward of that scalar.
        defer_sync: context in which gradients are not synchronised between ranks; used for all backwards but the
            last.
        after: sees each result, those of producers too, once its backward, or the producer's forward, has run.
        needs_synced_forward: gradients are synchronised only in the backward of a forward that ran outside
            `defer_sync` (DDP). A plan that ends with a producer's backward then runs one more, of weight 0.
    """
    run = _PlanRun(model, plan, trajectories, options, device, is_detached=True)
    if not plan.slots:
        result = run.forward_filler()
        backward(loss(result))
        after(result)
        return
    last = len(plan.microbatches) - 1
    try:
        for slot, microbatch in enumerate(plan.microbatches):
            is_last = slot == last and microbatch.window is None
            with contextlib.nullcontext() if is_last else defer_sync():
                for window in run.windows_to_open(microbatch):
                    after(run.produce(window))
                result = run.forward(microbatch)
                backward(loss(result))
            after(result)
            del result
            to_close = run.windows_to_close(microbatch, slot)
            for window in to_close:
                ends_plan = slot == last and window == to_close[-1] and not needs_synced_forward
                with contextlib.nullcontext() if ends_plan else defer_sync():
                    handed_back = run.boundaries.pop(window).hand_back()
                    if handed_back is not None:
                        backward(handed_back)
        if needs_synced_forward and plan.microbatches[-1].window is not None:
            backward(0.0 * run.forward_filler().output.log_probs.sum())
    finally:
        for boundary in run.boundaries.values():
            boundary.free()


class _PlanRun:
    """Forwards of a plan, and the boundaries that are alive.

    Attributes:
        boundaries (`dict[int, Boundary]`): of each window whose producer has run and whose consumers have not.
    """

    def __init__(self, model, plan, trajectories, options: ForwardOptions, device: torch.device, is_detached: bool):
        self.boundaries: dict[int, Boundary] = {}
        self._model, self._plan, self._options, self._device = model, plan, options, device
        self._batches = WindowBatches(plan, trajectories, device)
        self._is_detached = is_detached
        self._last_use: dict[int, int] = {}  # of each window: place of its last consumer among the microbatches
        for place, microbatch in enumerate(plan.microbatches):
            for window in plan.windows_above(microbatch.window):
                self._last_use[window] = place

    def windows_to_open(self, microbatch: Microbatch) -> list[int]:
        """Windows whose producers have to run before the microbatch, outermost first."""
        return [w for w in self._plan.windows_above(microbatch.window) if w not in self.boundaries]

    def windows_to_close(self, microbatch: Microbatch, place: int) -> list[int]:
        """Windows whose last consumer the microbatch is, innermost first."""
        path = self._plan.windows_above(microbatch.window)
        return [w for w in reversed(path) if self._last_use[w] == place]

    def produce(self, window: int) -> MicrobatchResult:
        """Run a window's producer and keep its boundary."""
        entry = self._plan.windows[window]
        source = None if entry.parent is None else self.boundaries[entry.parent]
        boundary = Boundary(entry.prefix_tokens, source, self._is_detached)
        batch = self._batches.of_producer(window, source, boundary)
        offload = contextlib.nullcontext()
        if self._options.offload_producers:
            offload = torch.autograd.graph.save_on_cpu(pin_memory=self._device.type == "cuda")
        with offload:
            output = self._call(batch)
        boundary.close()
        self.boundaries[window] = boundary
        return MicrobatchResult(Microbatch((), batch.num_rows, entry.parent), batch, output)

    def forward(self, microbatch: Microbatch) -> MicrobatchResult:
        """Run a microbatch from the boundary of its window, or from nothing."""
        source = None if microbatch.window is None else self.boundaries[microbatch.window]
        batch = self._batches.of_microbatch(microbatch, source)
        return MicrobatchResult(microbatch, batch, self._call(batch))

    def forward_filler(self) -> MicrobatchResult:
        """Run two rows that stand for no trajectory and weigh nothing."""
        batch = CompactBatch(filler_tree(), device=self._device)
        return MicrobatchResult(Microbatch((), 0), batch, self._call(batch))

    def _call(self, batch: CompactBatch) -> TreeOutput:
        options = self._options
        with options.autocast():
            return self._model(
                harts_batch=batch,
                temperature=options.temperature,
                with_entropies=options.with_entropies,
                with_router_logits=options.with_router_logits,
                head_in_fp32=options.head_in_fp32,
            )
