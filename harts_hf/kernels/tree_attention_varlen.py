"""Tree attention as one packed varlen call over gathered keys: HARTS's own scheme, and TRL's, kept as a comparator.

Each run of rows is a sequence whose keys are those of its whole path, aligned at the end. The gathered keys and values
take as many rows as the paths are long together, so memory grows with the number of branches times their depth.
"""

import itertools

import torch
import torch.nn.functional as F

from .attention_layout import AttentionLayout
from .attention_paths import AttentionPaths, attention_paths
from .gather_rows import gather_rows


def attend_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Tree attention by torch's flash attention on CUDA, run by run in plain torch on the CPU; see `tree_attention`.

    Args:
        q: `[1, H, C, K]`; bf16 or fp16 on CUDA.
        k: `[1, Hkv, C, K]`.
        v: `[1, Hkv, C, V]`; on CUDA padded to K, or q and k to V, since the kernel has one width.

    Returns:
        `[1, C, H, V]`, contiguous; behind a given prefix C counts its rows, whose queries and outputs mean nothing.

    Raises:
        ValueError: on CUDA, inputs that are neither bf16 nor fp16.
    """
    paths = attention_paths(layout)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))  # [C, heads, dim]
    k, v = (gather_rows(x, paths.key_rows) for x in (k, v))
    if not q.is_cuda:
        return _attend_by_run(q, k, v, paths, scale, window)[None]
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"implementation 'varlen' takes bfloat16 or float16 on CUDA, not {q.dtype}")
    value_dim, width = v.shape[-1], max(q.shape[-1], v.shape[-1])
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in (q, k, v))
    output, *_ = torch.ops.aten._flash_attention_forward(
        q.contiguous(),
        k,
        v,
        paths.cu_seqlens_q,
        paths.cu_seqlens_k,
        paths.longest_q,
        paths.longest_k,
        0.0,  # dropout
        True,  # causal, aligned at the last query and key
        False,  # no debug mask
        scale=scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )
    return output[None, ..., :value_dim].contiguous()


def _attend_by_run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, paths: AttentionPaths, scale: float, window: int | None
) -> torch.Tensor:
    """`[C, H, V]` from queries `[C, H, K]` and gathered keys `[., Hkv, K]` and values `[., Hkv, V]`."""
    groups = q.shape[1] // k.shape[1]
    outputs = []
    query_ranges, key_ranges = (itertools.pairwise(x.tolist()) for x in (paths.cu_seqlens_q, paths.cu_seqlens_k))
    for (q_begin, q_stop), (k_begin, k_stop) in zip(query_ranges, key_ranges, strict=True):
        keys, values = (x[k_begin:k_stop].repeat_interleave(groups, dim=1) for x in (k, v))
        q_positions = torch.arange(k_stop - k_begin - (q_stop - q_begin), k_stop - k_begin)
        distance = q_positions[:, None] - torch.arange(k_stop - k_begin)
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        scores = torch.einsum("qhk,shk->hqs", q[q_begin:q_stop] * scale, keys).masked_fill(hidden, float("-inf"))
        outputs.append(torch.einsum("hqs,shv->qhv", scores.softmax(-1), values))
    return torch.cat(outputs)
