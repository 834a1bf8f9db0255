"""Causal depthwise convolution on a prefix tree: each row reads its ancestors, never a sibling branch."""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from .conv_layout import ConvLayout
from .gather_rows import add_rows, gather_rows

_ACTIVATIONS = (None, "silu", "swish")


def tree_causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    layout: ConvLayout,
    *,
    activation: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """For each row, the weighted sum of the row and its W - 1 nearest ancestors, per channel.

    Equals `(x[ancestors] * weight.T).sum(1) + bias` with zeros before the trajectory's start: Transformers'
    `causal_conv1d_fn` on each trajectory alone, keeping each row once. Memory: no `[C, W, D]`; the backward reads
    again instead of keeping what the forward read.

    Args:
        x: `[C, D]`, floating point.
        weight: `[D, W]`, floating point, oldest tap first.
        bias: `[D]`, or None.
        layout: rows that each row reads, on the same device.
        activation: None, "silu" or "swish" (the same).
        implementation: "triton", one kernel with the activation, the default on CUDA; or "torch", one gather per tap,
            the default elsewhere. "triton" has no fp64.

    Returns:
        `[C, D]` in `x`'s dtype. As in Transformers, inputs and the result before the activation are rounded to
        `weight`'s dtype; sums are fp32 (fp64 for fp64). Differentiable in x, weight and bias; gradients are
        deterministic.

    Raises:
        ValueError: shapes or devices do not agree, or an unknown activation or implementation.
    """
    if activation not in _ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}, expected one of {_ACTIVATIONS}")
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1]:
        raise ValueError(f"x must be [C, D] and weight [D, W], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != x.shape[1:]:
        raise ValueError(f"bias must have shape {tuple(x.shape[1:])}, got {tuple(bias.shape)}")
    ancestors = layout.ancestors
    if ancestors.shape != (x.shape[0], weight.shape[1]):
        raise ValueError(
            f"ancestors must be [C, W] = {(x.shape[0], weight.shape[1])}, got {tuple(ancestors.shape)}: its width is "
            "the convolution's"
        )
    devices = {t.device for t in (x, weight, bias, ancestors) if t is not None}
    if len(devices) > 1:
        raise ValueError(f"x, weight, bias and layout must be on one device, got {sorted(map(str, devices))}")
    if implementation is None:
        implementation = "triton" if x.is_cuda and weight.dtype != torch.float64 else "torch"
    if implementation not in ("triton", "torch"):
        raise ValueError(f"unknown implementation {implementation!r}, expected 'triton' or 'torch'")

    if implementation == "triton":
        if weight.dtype == torch.float64:
            raise ValueError("implementation 'triton' has no fp64 kernel: pass implementation='torch'")
        from .tree_conv_triton import run_tree_conv  # needs Triton

        # The kernels compute in fp32: rounding to an fp32 weight's dtype is done inside, without copies in fp32.
        rows = x if weight.dtype == torch.float32 else x.to(weight.dtype)
        return run_tree_conv(rows.contiguous(), weight, bias, layout, use_silu=activation is not None).to(x.dtype)
    output = _TreeConv.apply(x.to(weight.dtype).contiguous(), weight, bias, ancestors)
    if activation is not None:
        output = F.silu(output)
    return output.to(x.dtype)


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, ancestors):
        ctx.save_for_backward(x, weight, ancestors)
        ctx.bias_dtype = None if bias is None else bias.dtype
        sum_dtype = torch.promote_types(weight.dtype, torch.float32)
        taps = weight.to(sum_dtype).unbind(1)
        output = x * taps[-1]
        for tap, rows in zip(taps[:-1], ancestors.unbind(1), strict=False):
            output.addcmul_(gather_rows(x, rows).to(sum_dtype), tap)
        if bias is not None:
            output += bias
        return output.to(weight.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, ancestors = ctx.saved_tensors
        grad = grad.to(torch.promote_types(weight.dtype, torch.float32))
        taps = weight.to(grad.dtype).unbind(1)
        grad_x = grad * taps[-1]
        grad_taps = [(grad * x).sum(0)]
        for tap, rows in zip(taps[:-1], ancestors.unbind(1), strict=False):
            grad_x += add_rows(grad * tap, rows, len(x))
            grad_taps.append((grad * gather_rows(x, rows)).sum(0))
        grad_weight = torch.stack(grad_taps[1:] + grad_taps[:1], dim=1)
        grad_bias = grad.sum(0).to(ctx.bias_dtype) if ctx.bias_dtype is not None else None
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias, None
