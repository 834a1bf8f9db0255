"""RMSNorm of rows, with a gate behind it or without, in one pass over memory forward and one backward.

Triton on CUDA, torch elsewhere. flash-linear-attention 0.6 has such norms, but compiles and tunes those of up to 512
channels anew for every 2,048 rows (65,536 with a gate), so that a row's bits may depend on how many rows there are.
Here the launch depends on the number of channels alone: a row has the same bits among any others.
"""

from typing import Literal

import torch

Activation = Literal["sigmoid", "silu"]
Implementation = Literal["triton", "torch"]


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    epsilon: float,
    zero_centered: bool = False,
    gate: torch.Tensor | None = None,
    activation: Activation | None = None,
    dtype: torch.dtype | None = None,
    implementation: Implementation | None = None,
) -> torch.Tensor:
    """`x / rms(x) * weight * activation(gate)`, in fp32, rounded once.

    Args:
        x: `[..., D]`; its rows may stand apart, as those of a slice of channels do.
        weight: `[D]`.
        epsilon: added to the mean square.
        zero_centered: the factor is 1 + weight.
        gate: shape of `x`; with an `activation`, and without one neither.
        dtype: of the result; `x`'s by default.
        implementation: "triton" (fp32, bf16, fp16) or "torch" (fp64 too, then in fp64); by default the device decides.

    Returns:
        `[..., D]` in `dtype`, differentiable in `x`, `weight` and `gate`, whose gradients have their dtypes. On one
        device the same input gives the same bits, forward and backward.

    Raises:
        ValueError: a gate without an activation or the reverse, or fp64 for Triton.
    """
    if (gate is None) != (activation is None):
        raise ValueError("a gate needs an activation, and an activation a gate")
    dtype = dtype or x.dtype
    if (implementation or ("triton" if x.is_cuda else "torch")) == "torch":
        return _rms_norm_torch(x, weight, epsilon, zero_centered, gate, activation, dtype)
    if x.dtype == torch.float64:
        raise ValueError("rms_norm in Triton computes in fp32: pass implementation='torch' for fp64")
    from .rms_norm_triton import RMSNorm

    rows = x.reshape(-1, x.shape[-1])
    gate_rows = None if gate is None else gate.reshape(-1, x.shape[-1])
    return RMSNorm.apply(rows, weight, gate_rows, epsilon, zero_centered, activation, dtype).view(x.shape)


def _rms_norm_torch(x, weight, epsilon, zero_centered, gate, activation, dtype):
    compute = torch.promote_types(x.dtype, torch.float32)
    x, weight = x.to(compute), weight.to(compute)
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * (1 + weight if zero_centered else weight)
    if gate is not None:
        gate = gate.to(compute)
        y = y * (torch.sigmoid(gate) if activation == "sigmoid" else torch.nn.functional.silu(gate))
    return y.to(dtype)
