"""Run a StepPlan on one replica: a forward per microbatch, and a backward where a loss is given."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from harts_hf.batch import CompactBatch
from harts_hf.models.enable import TreeOutput
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.tree import PrefixTree


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One trajectory of a step.

    Attributes:
        token_ids (`[len]`, int64): its tokens.
        scored (`[len]`, bool): tokens whose log-prob is wanted; False for the first, which has no context.
    """

    token_ids: np.ndarray
    scored: np.ndarray


@dataclass(frozen=True)
class ForwardOptions:
    """How a model is called for a compact batch.

    Attributes:
        temperature (`float`): the logits are divided by it.
        with_entropies, with_router_logits (`bool`): what the output holds beside log-probs.
        head_in_fp32 (`bool`): project to the vocabulary in fp32 whatever the model's dtype and autocast.
        autocast: a function that returns the context of the forward.
    """

    temperature: float = 1.0
    with_entropies: bool = True
    with_router_logits: bool = False
    head_in_fp32: bool = False
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


@dataclass(frozen=True)
class MicrobatchResult:
    """One microbatch's forward.

    Attributes:
        microbatch ([`Microbatch`]): the plan's entry.
        batch ([`CompactBatch`]): its tensors; trajectory `i` of the batch is `microbatch.trajectories[i]` of the step.
        output ([`TreeOutput`]): what the model returned for them.
    """

    microbatch: Microbatch
    batch: CompactBatch
    output: TreeOutput


def forward_plan(
    model, plan: StepPlan, trajectories: Sequence[Trajectory], options: ForwardOptions, device: torch.device
) -> Iterator[MicrobatchResult]:
    """Forward each microbatch of the plan's only replica, in order.

    The caller decides about gradients. A result and its graph live as long as the caller keeps the result.

    Args:
        model: a causal LM with a tree forward, as is or wrapped by PEFT or DDP.
        plan: a plan for one replica, of indices into `trajectories`.
        trajectories: the step's trajectories.
        options: how the model is called.
        device: where the model's inputs live.
    """
    for microbatch in plan.microbatches:
        yield _forward_microbatch(model, microbatch, trajectories, options, device)  # no name here keeps it alive


def _forward_microbatch(
    model, microbatch: Microbatch, trajectories: Sequence[Trajectory], options: ForwardOptions, device: torch.device
) -> MicrobatchResult:
    own = [trajectories[i] for i in microbatch.trajectories]
    tree = PrefixTree.from_sequences([t.token_ids for t in own])
    batch = CompactBatch(tree, [t.scored for t in own], device)
    with options.autocast():
        output = model(
            harts_batch=batch,
            temperature=options.temperature,
            with_entropies=options.with_entropies,
            with_router_logits=options.with_router_logits,
            head_in_fp32=options.head_in_fp32,
        )
    return MicrobatchResult(microbatch, batch, output)


def train_plan(
    model,
    plan: StepPlan,
    trajectories: Sequence[Trajectory],
    options: ForwardOptions,
    device: torch.device,
    *,
    loss: Callable[[MicrobatchResult], torch.Tensor],
    backward: Callable[[torch.Tensor], None],
    defer_sync: Callable[[], contextlib.AbstractContextManager],
    after: Callable[[MicrobatchResult], None],
) -> None:
    """Forward and backward each microbatch of the plan's only replica; gradients add up in the parameters.

    Args:
        model, plan, trajectories, options, device: as for [`forward_plan`].
        loss: a microbatch's result -> the scalar whose gradient is wanted. The sum over microbatches is the step's
            loss.
        backward: runs the backward of that scalar.
        defer_sync: context in which gradients are not synchronised between ranks; used for all microbatches but the
            last.
        after: sees each result once its backward has run and its graph is gone.
    """
    remaining = len(plan.microbatches)
    results = forward_plan(model, plan, trajectories, options, device)
    while remaining:
        remaining -= 1
        with defer_sync() if remaining else contextlib.nullcontext():
            result = next(results)
            backward(loss(result))
        after(result)
        del result
