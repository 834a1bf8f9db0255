"""Give one model instance a tree forward, and take it away.

The instance's `forward` accepts a compact batch as the keyword `harts_batch` (or the dict of
[`DataCollatorWithPrefixTree`]) and returns log-probs and entropies; any other call runs as before. Functions of the
modeling module stay wrapped once some instance was enabled; without a batch they run as before.
"""

from typing import get_args

from harts_hf.kernels import linear_attention as linear_kernels
from harts_hf.kernels import tree_attention as attention_kernels

from . import fused_experts  # noqa: F401  makes its name known to Transformers
from .causal_lm import causal_lm_of
from .families import UnsupportedModelError, family_of
from .tree_forward import TreeForward

_ATTRIBUTE = "_harts_tree_forward"  # on the instance, so that copies and pickles have it too


def enable_tree_forward(
    model,
    *,
    linear_attention: linear_kernels.Implementation | None = None,
    attention: attention_kernels.Implementation | None = None,
):
    """Give `model` a tree forward.

    Works on the instance: other instances of the class are untouched. On a model that has one already, only the
    implementations that are given take the place of those before; without any, nothing changes. The model's
    parameters, config, saved checkpoint and ordinary calls stay as they are.

    Args:
        model: a Transformers causal LM or a PEFT model around one, not yet wrapped by DDP or FSDP.
        linear_attention: implementation of the linear-attention layers, by its name in
            `harts_hf/kernels/linear_attention.py`; by default the device decides.
        attention: implementation of the softmax layers, by its name in `harts_hf/kernels/tree_attention.py`; by
            default device, dtype and head widths decide.

    Returns:
        the same model.

    Raises:
        ValueError: an implementation has no such name, or `linear_attention` is given for a softmax model. One that
            does not serve the layers' inputs raises when they run.
        UnsupportedModelError: the architecture or an option has no tree forward; the message says what is supported.
        TypeError: `model` is neither a Transformers causal LM nor a PEFT model around one.
        ImportError: another minor version of Transformers is installed than the one the seams were read in.
    """
    _check_implementation("linear_attention", linear_attention, linear_kernels.Implementation)
    _check_implementation("attention", attention, attention_kernels.Implementation)
    base = causal_lm_of(model)
    family = family_of(base)
    if linear_attention is not None and family.linear_attention is None:
        raise ValueError(f"linear_attention is {linear_attention!r}, but {type(base).__name__} has no such layers")
    if not has_tree_forward(base):
        if base.get_output_embeddings() is None:
            raise UnsupportedModelError(
                f"{type(base).__name__} is no causal LM: it has no output head over the vocabulary"
            )
        tree_forward = TreeForward(base, family, base.__dict__.get("forward"))
        tree_forward.install_seams()
        base.forward = tree_forward
        setattr(base, _ATTRIBUTE, tree_forward)
    getattr(base, _ATTRIBUTE).choose(linear_attention, attention)
    return model


def _check_implementation(option: str, name: str | None, known) -> None:
    if name is not None and name not in get_args(known):
        raise ValueError(f"{option} must be one of {get_args(known)}, got {name!r}")


def disable_tree_forward(model):
    """Take the tree forward away; the instance's forward is what it was before. Does nothing on a model without one.

    Raises:
        RuntimeError: something else has wrapped the model's forward since, so it cannot be put back.
    """
    base = causal_lm_of(model)
    if not has_tree_forward(base):
        return model
    tree_forward = getattr(base, _ATTRIBUTE)
    if base.__dict__.get("forward") is not tree_forward:
        raise RuntimeError("the model's forward was wrapped after enable_tree_forward: undo that first")
    if tree_forward.instance_forward is None:
        del base.forward
    else:
        base.forward = tree_forward.instance_forward
    delattr(base, _ATTRIBUTE)
    return model


def has_tree_forward(model) -> bool:
    """Whether `enable_tree_forward` was called on the model, or on the model it is a copy of."""
    return _ATTRIBUTE in causal_lm_of(model).__dict__
