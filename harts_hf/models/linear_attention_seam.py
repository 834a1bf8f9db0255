"""The linear-attention seam: a modeling module's conv and chunk functions, wrapped once.

Layers call these functions by their module-level name, with the keyword arguments of the model's forward. With a
compact batch among them, the tree kernels run; without one, the original runs with its arguments untouched.
"""

import functools
import importlib
from types import ModuleType

import torch

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kda
from harts_hf.kernels.tree_conv import tree_causal_conv

from .families import CONV_FUNCTION, Family

CHUNK_SIZE = 64  # of flash-linear-attention's kernels and of Transformers' torch functions
_TREE_FUNCTIONS = {"kda": tree_kda, "gated_delta_rule": tree_gated_delta_rule}


def install_linear_attention_seam(family: Family) -> None:
    """Wrap the conv and chunk functions of the family's modeling module; does nothing where that is done already."""
    if family.linear_attention is None or family.chunk_function is None:  # a softmax model
        return
    module = importlib.import_module(family.modeling_module)
    _wrap(module, CONV_FUNCTION, _conv_seam)
    _wrap(module, family.chunk_function, functools.partial(_chunk_seam, kind=family.linear_attention))


class _Seam:
    """A module-level function with a tree version beside it. A class so that it pickles and is recognised."""

    def __init__(self, original, tree_version):
        functools.update_wrapper(self, original)
        self.original = original
        self.tree_version = tree_version

    def __call__(self, *args, harts_batch: CompactBatch | None = None, **kwargs):
        if harts_batch is None:
            return self.original(*args, **kwargs)
        return self.tree_version(*args, harts_batch=harts_batch, **kwargs)


def _wrap(module: ModuleType, name: str, tree_version) -> None:
    function = getattr(module, name)
    if not isinstance(function, _Seam):
        setattr(module, name, _Seam(function, tree_version))


def _conv_seam(
    hidden_states: torch.Tensor,  # [1, D, C]
    weight: torch.Tensor,  # [D, W]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    harts_batch: CompactBatch,
    **kwargs,  # the model's own keyword arguments: masks and positions that a conv over rows has no use for
) -> torch.Tensor:
    layout = harts_batch.conv_layout(weight.shape[-1])
    rows = tree_causal_conv(hidden_states[0].transpose(0, 1), weight, bias, layout, activation=activation)
    return rows.transpose(0, 1)[None]


def _chunk_seam(
    query: torch.Tensor,  # [1, C, Hk, K]
    key: torch.Tensor,
    value: torch.Tensor,  # [1, C, H, V]
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    kind: str,
    harts_batch: CompactBatch,
    harts_safe_gate: bool,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    if initial_state is not None or output_final_state:
        raise ValueError("a tree forward has no cache: call the model with use_cache=False")
    options = {"safe_gate": harts_safe_gate} if kind == "kda" else {}
    output, _ = _TREE_FUNCTIONS[kind](
        query[0],
        key[0],
        value[0],
        g[0],
        beta[0],
        harts_batch.chunk_layout(CHUNK_SIZE),
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        **options,
    )
    return output[None], None
