"""KDA's forget gate, in one pass over memory forward and one backward. Triton on CUDA, torch elsewhere.

flash-linear-attention 0.6 has such a gate, but its softplus takes the logarithm of 1 + exp(x), which loses the digits
of a slow decay.
"""

from typing import Literal

import torch

Implementation = Literal["triton", "torch"]


def kda_gate(
    x: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    lower_bound: float | None,
    dtype: torch.dtype,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """Log decays, natural log, <= 0: `lower_bound * sigmoid(exp(A_log) * (x + dt_bias))`, or without a bound
    `-exp(A_log) * softplus(x + dt_bias)`, in fp32, rounded once.

    Args:
        x: `[..., H, K]`.
        A_log: H elements of any shape.
        dt_bias: `[H K]`.
        lower_bound: below 0, or None for the gate without a bound.
        dtype: of the result.
        implementation: "triton" (fp32, bf16, fp16) or "torch" (fp64 too, then in fp64); by default the device decides.

    Returns:
        `[..., H, K]` in `dtype`; differentiable in `x`, `A_log` and `dt_bias`. On one device the same input gives the
        same bits, forward and backward.

    Raises:
        ValueError: fp64 for Triton.
    """
    if (implementation or ("triton" if x.is_cuda else "torch")) == "torch":
        return log_decay(x, A_log, dt_bias, lower_bound).to(dtype)
    if x.dtype == torch.float64:
        raise ValueError("kda_gate in Triton computes in fp32: pass implementation='torch' for fp64")
    from .kda_gate_triton import KDAGate

    return KDAGate.apply(x, A_log, dt_bias, None if lower_bound is None else float(lower_bound), dtype)


def log_decay(
    x: torch.Tensor, A_log: torch.Tensor | None, dt_bias: torch.Tensor | None, lower_bound: float | None
) -> torch.Tensor:
    """The gate in torch, on any device: as `kda_gate`, in fp32 (fp64 for fp64 `x`), and in that dtype.

    Without `A_log` the rate is 1, without `dt_bias` nothing is added, as in `chunk_kda(use_gate_in_kernel=True)`.
    """
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if dt_bias is not None:
        x = x + dt_bias.to(x.dtype).view(x.shape[-2:])
    rate = 1.0 if A_log is None else A_log.to(x.dtype).exp().view(-1, 1)
    if lower_bound is None:
        return -rate * torch.nn.functional.softplus(x)
    return lower_bound * torch.sigmoid(rate * x)
