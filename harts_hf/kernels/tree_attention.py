"""Softmax attention on a prefix tree: each row attends to its ancestors and itself.

Rows are in depth-first order, so the subtree of row k is the rows k .. subtree_end[k] - 1, and k is visible to q iff
k <= q < subtree_end[k]. Implementations:

| name | runs on | memory beside inputs and outputs | what it is |
|---|---|---|---|
| "flash4" | Hopper, bf16 and fp16 | tile lists | flash-attn-4 with tile lists; the extra `harts_hf[flash4]` |
| "flex" | CUDA | tile lists | FlexAttention with a block mask, compiled; on the CPU dense and forward alone |
| "varlen" | CUDA, CPU | keys and values of all paths | packed flash attention; HARTS's own scheme |
| "sdpa" | CUDA, CPU | C * C mask elements, with a prefix C * (p + C) | dense mask |

The default on the CPU is "sdpa". On CUDA it is "sdpa" up to 1024 rows, where a dense mask is small and nothing has to
be compiled; above, "flash4" where it is installed and takes the inputs, else "flex". Heads narrower than FlexAttention
takes get "sdpa" too. The choice is logged once. Tables are made once per layout, and shared by all layers and by
recomputation.
"""

import functools
import logging
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from .attention_layout import AttentionLayout
from .tree_attention_flash4 import attend_flash4, flash4_is_installed, flash4_refusal
from .tree_attention_flex import FLEX_NARROWEST, attend_flex
from .tree_attention_varlen import attend_varlen

Implementation = Literal["flash4", "flex", "varlen", "sdpa"]
_FEW_ROWS = 1024  # a mask of at most 4 MiB
logger = logging.getLogger(__name__)


def tree_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Causal attention along each trajectory, each row computed once.

    Equals `softmax(scale * q k^T + mask) v` with `layout.dense_mask(window)`.

    Args:
        q: `[1, H, C, K]`.
        k: `[1, Hkv, p + C, K]`; Hkv divides H, each of its heads serves H / Hkv consecutive query heads. The first p
            rows are given: the layout's `prefix_rows`.
        v: `[1, Hkv, p + C, V]`; V may differ from K, as in MLA.
        layout: on the same device.
        scale: of the scores.
        window: sliding window in positions, at least 1; None for none.
        implementation: see above; None chooses by device, dtype and widths. One that cannot run raises.

    Returns:
        `[1, C, H, V]` in `q`'s dtype, contiguous: what Transformers' attention functions return.

    Raises:
        ValueError: shapes or devices do not agree, a window below 1, an unknown implementation, or one that does not
            take these inputs.
        ImportError: "flash4" is asked for and not installed.
        RuntimeError: "flex" on CUDA where `torch.compile` is switched off.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}")
    _check_inputs(q, k, v, layout, window)
    if implementation is None:
        implementation = _choose(q, k, v)
    elif implementation == "flash4" and (refusal := flash4_refusal(q, v)) is not None:
        raise ValueError(refusal)
    attend = {"flash4": attend_flash4, "flex": attend_flex, "varlen": attend_varlen, "sdpa": _attend_sdpa}
    prefix_rows = 0 if implementation == "sdpa" else layout.prefix_rows
    if prefix_rows:  # kernels of square matrices; tile lists leave these queries their own tiles alone
        q = F.pad(q, (0, 0, prefix_rows, 0))
    return attend[implementation](q, k, v, layout, scale=scale, window=window)[:, prefix_rows:]


def _choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Implementation:
    if not q.is_cuda:
        return _log_once("sdpa", "on the CPU")
    if q.shape[2] * k.shape[2] <= _FEW_ROWS**2:
        return _log_once("sdpa", f"up to {_FEW_ROWS} rows on CUDA")
    refusal = flash4_refusal(q, v)
    if refusal is None and not flash4_is_installed():
        refusal = "flash-attn-4 is not installed (pip install 'harts_hf[flash4]')"
    if refusal is None:
        return _log_once("flash4", "on CUDA")
    if min(q.shape[-1], v.shape[-1]) < FLEX_NARROWEST:
        return _log_once("sdpa", f"on CUDA, for heads narrower than {FLEX_NARROWEST}: {refusal}")
    return _log_once("flex", f"on CUDA: {refusal}")


@functools.cache
def _log_once(implementation: Implementation, where: str) -> Implementation:
    logger.info("tree attention runs '%s' %s", implementation, where)
    return implementation


def _attend_sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    # The fused kernels want one head width. Zeros add nothing to a score, and give value columns that are cut off.
    value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    # Additive: a boolean mask would be converted again by every call, and kept for its backward.
    mask = layout.dense_mask(window, dtype=q.dtype)
    output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return output[..., :value_dim].transpose(1, 2).contiguous()


def _check_inputs(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: AttentionLayout, window: int | None
) -> None:
    shapes = [tuple(x.shape) for x in (q, k, v)]
    if any(len(shape) != 4 or shape[0] != 1 for shape in shapes):
        raise ValueError(f"q, k, v must be [1, heads, C, dim], got {shapes}: a tree is one batch entry")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q [1, H, C, K], k [1, Hkv, C, K] and v [1, Hkv, C, V] with Hkv dividing H, got {shapes}")
    if q.shape[2] != layout.num_rows or k.shape[2] != layout.num_keys:
        raise ValueError(
            f"q has {q.shape[2]} rows and k {k.shape[2]}, but the layout has {layout.num_rows} and {layout.num_keys}"
        )
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 position, got {window}")
    devices = {x.device for x in (q, k, v, layout.subtree_end)}
    if len(devices) > 1:
        raise ValueError(f"q, k, v and the layout must be on one device, got {sorted(map(str, devices))}")
