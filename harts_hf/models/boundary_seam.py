"""The boundary seam: numbers of layers, handing over, and how a producer recomputes."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from harts_hf.batch import CompactBatch

from .families import UnsupportedModelError


@contextlib.contextmanager
def number_layers(backbone: torch.nn.Module) -> Iterator[None]:
    """Give each decoder layer its number, as the keyword argument `harts_layer`, during one forward.

    The hooks stand outside of Transformers' checkpointing of a layer, so a recomputation in the backward pass replays
    the number with the layer's other arguments.
    """

    def give_number(layer: int):
        return lambda _module, args, kwargs: (args, {**kwargs, "harts_layer": layer})

    layers = backbone.get_submodule("layers").children()
    handles = [layer.register_forward_pre_hook(give_number(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def hand_over(batch: CompactBatch, layer: int, name: str, own: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Put what the batch computed for its own rows, along `dim`, into the boundary it produces.

    Returns:
        The same, behind what the boundary that the batch starts from has for the prefix's rows.
    """
    if batch.produces is not None:
        batch.produces.put(layer, name, own)
    return own if batch.starts_from is None else batch.starts_from.before(own, layer, name, dim=dim)


@contextlib.contextmanager
def recompute_final_norm(backbone: torch.nn.Module) -> Iterator[None]:
    """Let the norm behind the layers keep its input alone, and recompute the rest in the backward pass.

    It stands outside of Transformers' checkpoints. The stock one keeps its input in fp32 and its normalized rows, and
    those of a producer would wait until its consumers have run.
    """
    norm = backbone.get_submodule("norm")
    instance_forward = norm.__dict__.get("forward")
    norm.forward = functools.partial(checkpoint, norm.forward, use_reentrant=False)
    try:
        yield
    finally:
        del norm.forward
        if instance_forward is not None:
            norm.forward = instance_forward


def refuse_reentrant_checkpointing(backbone: torch.nn.Module) -> None:
    """Raise if activations are recomputed in reentrant mode.

    It runs layers without a graph first, so tensors that leave a layer through a boundary would have no gradient.

    Raises:
        UnsupportedModelError: says what to set.
    """
    for module in backbone.modules():
        if getattr(module, "gradient_checkpointing", False) and backbone.training:
            function: Any = module._gradient_checkpointing_func  # a partial of torch's, with the user's options
            if function.keywords.get("use_reentrant", True):
                raise UnsupportedModelError(
                    "sharing windows need gradient checkpointing with use_reentrant=False: in reentrant mode a "
                    "boundary's gradients would be lost. Set gradient_checkpointing_kwargs={'use_reentrant': False}, "
                    "or sharing_windows=False."
                )
