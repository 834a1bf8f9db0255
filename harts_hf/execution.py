"""Run a StepPlan on one replica: a forward per microbatch, and a backward where a loss is given.

A sharing window's producer runs before its first consumer. Its consumers start from its boundary, whose tensors are
leaves; the producer runs backward after its last consumer, and nothing of it is kept.
"""

import contextlib
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from harts_hf.batch import CompactBatch
from harts_hf.boundary import Boundary
from harts_hf.models.tree_forward import TreeOutput
from harts_hf.planning.consumer_tree import filler_tree
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.planning.program import Operation, plan_program
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
    model,
    plan: StepPlan,
    trajectories: Sequence[Trajectory],
    options: ForwardOptions,
    device: torch.device,
    program: Sequence[Operation] | None = None,
) -> Iterator[MicrobatchResult]:
    """Forward each microbatch of the plan's only replica, in order.

    A filler's result comes too: two rows that stand for no trajectory. A plan without microbatches has one, so that a
    replica with nothing to run makes the calls that others wait for.

    The caller decides about gradients. A result and its graph live as long as the caller keeps the result; results of
    one window share the producer's graph, so one backward has to serve all of them.

    Args:
        model: a causal LM with a tree forward, as is or wrapped by PEFT, DDP or FSDP2.
        plan: a plan for one replica, of indices into `trajectories`.
        trajectories: the step's trajectories.
        options: how the model is called.
        device: where the model's inputs live.
        program: in which order, and with which fillers; by default the plan's own order without any.
    """
    run = _PlanRun(model, plan, trajectories, options, device, is_detached=False)
    for operation in plan_program(plan) if program is None else program:
        if operation.kind == "produce":
            run.produce(operation.index)
        elif operation.kind == "microbatch":
            yield run.forward(operation.index)  # no name here keeps it alive
        elif operation.index is not None:
            boundary = run.boundaries.pop(operation.index)
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
    program: Sequence[Operation] | None = None,
) -> None:
    """Forward and backward each microbatch of the plan's only replica; gradients add up in the parameters.

    An exception leaves the gradients of what has run: the caller drops them. Boundaries are freed.

    Args:
        model, plan, trajectories, options, device: as for [`forward_plan`].
        loss: a microbatch's result -> the scalar whose gradient is wanted; for a filler's, a 0 that is in the graph.
            The sum over microbatches is the step's loss.
        backward: runs the backward of that scalar.
        defer_sync: context in which gradients are not synchronised between ranks; used for all backwards but the
            last.
        after: sees each result, those of producers and fillers too, once its backward, or the producer's forward, has
            run.
        needs_synced_forward: gradients are synchronised only in the backward of a forward that ran outside
            `defer_sync` (DDP). A program that ends with a producer's backward then runs a filler behind it.
        program: as for [`forward_plan`]. With one, ranks wait for each other within forwards and backwards: every
            backward then reaches all outputs of its forward, with a gradient of 0 if need be, so that the hooks of
            FSDP fire alike on all ranks.
    """
    run = _PlanRun(model, plan, trajectories, options, device, is_detached=True)
    operations = plan_program(plan) if program is None else tuple(program)
    if needs_synced_forward and operations[-1].kind == "hand_back":
        operations += (Operation("microbatch", None),)
    anchors: dict[int, torch.Tensor] = {}  # lane -> a 0 in the graph of the producer's outputs
    try:
        for place, step in enumerate(operations):
            with contextlib.nullcontext() if place == len(operations) - 1 else defer_sync():
                if step.kind == "produce":
                    result = run.produce(step.index)
                    if program is not None:
                        anchors[step.lane] = _anchor(result.output)
                    after(result)
                elif step.kind == "microbatch":
                    result = run.forward(step.index)
                    total = loss(result)
                    backward(total if program is None else total + _anchor(result.output))
                    after(result)
                    del total
                else:
                    result = None
                    parts = [] if program is None else [anchors.pop(step.lane)]
                    if step.index is not None:
                        handed_back = run.boundaries.pop(step.index).hand_back()
                        parts += [] if handed_back is None else [handed_back]
                    if parts:
                        backward(functools.reduce(operator.add, parts))
                del result
    finally:
        for boundary in run.boundaries.values():
            boundary.free()


def _anchor(output: TreeOutput) -> torch.Tensor:
    """A 0 whose backward starts at every output that has a graph."""
    tensors = [output.log_probs, output.entropies, *(output.router_logits or ())]
    return functools.reduce(operator.add, (x[:0].sum() for x in tensors if x is not None and x.requires_grad))


class _PlanRun:
    """Forwards of a plan, and the boundaries that are alive.

    Attributes:
        boundaries (`dict[int, Boundary]`): of each window whose producer has run and whose consumers have not.
    """

    def __init__(self, model, plan, trajectories, options: ForwardOptions, device: torch.device, is_detached: bool):
        self.boundaries: dict[int, Boundary] = {}
        self._model, self._plan, self._options, self._device = model, plan, options, device
        self._microbatches = plan.microbatches
        self._batches = WindowBatches(plan, trajectories, device)
        self._is_detached = is_detached

    def produce(self, window: int | None) -> MicrobatchResult:
        """Run a window's producer and keep its boundary; a filler for `None`."""
        if window is None:
            return self.forward(None)
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

    def forward(self, index: int | None) -> MicrobatchResult:
        """Run a microbatch from the boundary of its window, or from nothing; a filler for `None`."""
        if index is None:
            batch = CompactBatch(filler_tree(), device=self._device)
            return MicrobatchResult(Microbatch((), 0), batch, self._call(batch))
        microbatch = self._microbatches[index]
        source = None if microbatch.window is None else self.boundaries[microbatch.window]
        batch = self._batches.of_microbatch(microbatch, source)
        return MicrobatchResult(microbatch, batch, self._call(batch))

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
