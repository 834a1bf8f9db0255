"""Softmax attention on a prefix tree: each row attends to its ancestors and itself.

Rows are in depth-first order, so the subtree of row k is the rows k .. subtree_end[k] - 1, and k is visible to q iff
k <= q < subtree_end[k]. Implementation "sdpa" gives that mask densely to `scaled_dot_product_attention`, on the CPU
and on CUDA: C * C mask elements, shared by all layers.
"""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
import torch.nn.functional as F

Implementation = Literal["sdpa"]


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Which rows each row may attend to. Masks are made on first use and kept.

    Keys are p rows that are given and the C rows that are computed; queries are the latter.

    Attributes:
        subtree_end (`[p + C]`, int64): one past the last row of each row's subtree.
        position_ids (`[p + C]`, int64): distance from the trajectory's start, in tokens.
        prefix_rows (`int`): p, 0 for a tree that is computed as a whole.
    """

    subtree_end: torch.Tensor
    position_ids: torch.Tensor
    prefix_rows: int = 0
    _masks: dict[tuple[int | None, torch.dtype], torch.Tensor] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """C, the queries."""
        return len(self.subtree_end) - self.prefix_rows

    @property
    def num_keys(self) -> int:
        """p + C."""
        return len(self.subtree_end)

    def dense_mask(self, window: int | None = None, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Mask of queries (dim 2) against keys (dim 3).

        Args:
            window: if given, row q sees only keys with `position[q] - position[k] < window`, itself included: the
                sliding window of Transformers, in positions of the trajectory.
            dtype: `torch.bool`, True where visible; or a floating dtype, 0 where visible and -inf elsewhere.

        Returns:
            `[1, 1, C, p + C]`, the same tensor on each call.
        """
        key = (window, dtype)
        if key not in self._masks:
            keys = torch.arange(self.num_keys, device=self.subtree_end.device)
            rows = keys[self.prefix_rows :]
            visible = (keys[None, :] <= rows[:, None]) & (rows[:, None] < self.subtree_end[None, :])
            if window is not None:
                visible &= self.position_ids[self.prefix_rows :, None] - self.position_ids[None, :] < window
            if dtype != torch.bool:
                visible = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
            self._masks[key] = visible[None, None]
        return self._masks[key]


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
        implementation: "sdpa", the default on every device.

    Returns:
        `[1, C, H, V]` in `q`'s dtype, contiguous: what Transformers' attention functions return.

    Raises:
        ValueError: shapes or devices do not agree, a window below 1, or an unknown implementation.
    """
    if implementation is not None and implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}")
    _check_inputs(q, k, v, layout, window)

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
