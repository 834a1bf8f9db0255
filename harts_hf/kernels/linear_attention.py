"""Linear attention on a prefix tree: KDA and Gated DeltaNet, each row computed once.

The state of a row is that of its parent, updated by the row's token, so a branch continues from its fork. Chunks are
counted from each trajectory's start, so a trajectory's arithmetic is that of running it alone. Implementations:

- "torch": plain torch, chunk by chunk, all rounds at once; the default on the CPU.
- "rounds": one packed call of flash-linear-attention per round; the default on CUDA, and only there.
- "reference": the token recurrence, the specification; slow.
"""

from typing import Literal, get_args

import torch

from .chunk_layout import ChunkLayout
from .linear_attention_reference import run_recurrence
from .linear_attention_rounds import load_packed_function, run_rounds
from .linear_attention_torch import run_chunks

Implementation = Literal["torch", "rounds", "reference"]


def tree_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: ChunkLayout,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Kimi Delta Attention over the rows of a prefix tree: a delta rule with one decay per key channel.

    For row r with parent p: S' = diag(exp(g_r)) S_p; S_r = S' + beta_r k_r (v_r - S'^T k_r)^T; o_r = scale S_r^T q_r,
    and S_p = 0 above a root. The same as running `chunk_kda` on each trajectory and keeping each row once.

    Args:
        q, k: `[C, Hk, K]`. Hk divides H; each of their heads serves H / Hk consecutive value heads.
        v: `[C, H, V]`, of the same dtype: fp32, bf16, fp16, or fp64.
        g: `[C, H, K]`, log decay, natural log, <= 0.
        beta: `[C, H]`, in 0 .. 1.
        layout: chunks and packed calls of the tree, on the same device. "torch" needs a chunk size that is a power of
            two, "rounds" one of 64.
        scale: of the queries; defaults to K ** -0.5.
        use_qk_l2norm: divide each query and key head by sqrt(sum of squares + 1e-6) first.
        implementation: see the module; defaults to "rounds" on CUDA and "torch" elsewhere. Never falls back.

    Returns:
        `[C, H, V]` in `q`'s dtype. "torch" and "reference" compute in fp32, in fp64 for fp64 inputs, whatever autocast
        says; states are fp32 at least in all. Differentiable in q, k, v, g and beta; gradients are deterministic.

    Raises:
        ValueError: shapes, dtypes or devices do not agree, the implementation is unknown or does not serve the device,
            the dtype or the chunk size.
        ImportError: "rounds" without flash-linear-attention.
    """
    _check_inputs(q, k, v, g, beta, layout, decay_shape=(*v.shape[:2], q.shape[-1]))
    return _run(q, k, v, g, beta, layout, scale, use_qk_l2norm, implementation, "kda")


def tree_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: ChunkLayout,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Gated DeltaNet over the rows of a prefix tree: a delta rule with one decay per head.

    As `tree_kda`, with S' = exp(g_r) S_p and `g` of shape `[C, H]`.
    """
    _check_inputs(q, k, v, g, beta, layout, decay_shape=tuple(v.shape[:2]))
    return _run(q, k, v, g, beta, layout, scale, use_qk_l2norm, implementation, "gated_delta_rule")


def _check_inputs(q, k, v, g, beta, layout: ChunkLayout, decay_shape: tuple[int, ...]) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3:
        raise ValueError(
            f"q and k must be [C, Hk, K] and v [C, H, V], got {[tuple(x.shape) for x in (q, k, v)]}: no batch dim"
        )
    num_rows, num_heads = v.shape[:2]
    if len(q) != num_rows or num_rows != layout.num_rows:
        raise ValueError(f"q has {len(q)} rows and v {num_rows}, but the layout has {layout.num_rows}")
    if num_heads % q.shape[1]:
        raise ValueError(f"the {q.shape[1]} heads of q and k must divide the {num_heads} heads of v")
    if tuple(g.shape) != decay_shape:
        raise ValueError(f"g must have shape {decay_shape}, got {tuple(g.shape)}")
    if beta.shape != v.shape[:2]:
        raise ValueError(f"beta must have shape {tuple(v.shape[:2])}, got {tuple(beta.shape)}")
    if not q.dtype == k.dtype == v.dtype or not all(x.is_floating_point() for x in (q, g, beta)):
        raise ValueError(
            f"q, k, v must share one floating dtype, and g, beta be floating: got {q.dtype}, {k.dtype}, {v.dtype}, "
            f"{g.dtype}, {beta.dtype}"
        )
    devices = {x.device for x in (q, k, v, g, beta, layout.rows)}
    if len(devices) > 1:
        raise ValueError(f"inputs and layout must be on one device, got {sorted(map(str, devices))}")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: ChunkLayout,
    scale: float | None,
    use_qk_l2norm: bool,
    implementation: Implementation | None,
    kind: Literal["kda", "gated_delta_rule"],
) -> torch.Tensor:
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if implementation is None:
        implementation = "rounds" if q.is_cuda else "torch"
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}")

    if implementation == "rounds":
        _check_rounds(q, layout)
        packed = load_packed_function(kind)
        return run_rounds(q, k, v, g, beta, layout, scale=scale, use_qk_l2norm=use_qk_l2norm, packed=packed)

    output_dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = _prepare(q, k, v, g, beta, scale, use_qk_l2norm)
        if implementation == "reference":
            return run_recurrence(q, k, v, g, beta, layout.row_parents).to(output_dtype)
        if layout.chunk_size & (layout.chunk_size - 1):
            raise ValueError(
                f"implementation 'torch' needs a chunk size that is a power of two, got {layout.chunk_size}"
            )
        return run_chunks(q, k, v, g, beta, layout).to(output_dtype)


def _check_rounds(q: torch.Tensor, layout: ChunkLayout) -> None:
    if not q.is_cuda:
        raise ValueError(
            f"implementation 'rounds' runs flash-linear-attention's Triton kernels and needs CUDA tensors, got "
            f"{q.device}: pass implementation='torch'"
        )
    if q.dtype == torch.float64:
        raise ValueError("implementation 'rounds' has no fp64 kernels: pass implementation='torch'")
    if layout.chunk_size != 64:
        raise ValueError(f"implementation 'rounds' runs kernels of chunk size 64, the layout has {layout.chunk_size}")


def _prepare(q, k, v, g, beta, scale: float, use_qk_l2norm: bool) -> tuple[torch.Tensor, ...]:
    """Inputs in fp32 (fp64 stays), normalised, scaled, one q and k head per value head, `g` as `[C, H, K or 1]`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * scale
    group = v.shape[1] // q.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    return q, k, v, g if g.dim() == 3 else g[..., None], beta
