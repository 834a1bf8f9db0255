"""`weighted_swiglu` of `expert_rows.py` in Triton: one pass over the rows forward, one backward. All in fp32."""

import torch
import triton
import triton.language as tl

from .swiglu_triton import silu_and_slope


def forward(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`[S, I]` of `gate_up` `[S, 2 I]` and `weights` `[S]`, contiguous, CUDA: see `expert_rows.weighted_swiglu`."""
    width = gate_up.shape[1] // 2
    output = gate_up.new_empty(len(gate_up), width)
    if output.numel():
        _forward_swiglu_kernel[(len(gate_up),)](
            gate_up, weights, output, width, BLOCK=min(1024, triton.next_power_of_2(width))
        )
    return output


def backward(gate_up: torch.Tensor, weights: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `gate_up`, `[S, 2 I]`, and of `weights`, `[S]`, from `grad`, that of the output, `[S, I]`."""
    width = gate_up.shape[1] // 2
    grad_gate_up, grad_weights = torch.empty_like(gate_up), torch.zeros_like(weights)
    if grad.numel():
        _backward_swiglu_kernel[(len(gate_up),)](
            gate_up, weights, grad, grad_gate_up, grad_weights, width, BLOCK=min(1024, triton.next_power_of_2(width))
        )
    return grad_gate_up, grad_weights


@triton.jit
def _forward_swiglu_kernel(gate_up, weights, output, width, BLOCK: tl.constexpr):
    """Grid (rows). Columns past `width` are masked."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_inside = column < width
        gate = tl.load(gate_up + row * 2 * width + column, mask=is_inside, other=0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + column, mask=is_inside, other=0).to(tl.float32)
        result = weight * gate * tl.sigmoid(gate) * up
        tl.store(output + row * width + column, result.to(output.dtype.element_ty), mask=is_inside)


@triton.jit
def _backward_swiglu_kernel(gate_up, weights, grad_output, grad_gate_up, grad_weights, width, BLOCK: tl.constexpr):
    """Grid (rows); the weight's gradient is the row's sum. Columns past `width` are masked."""
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_inside = column < width
        at = row * 2 * width + column
        gate = tl.load(gate_up + at, mask=is_inside, other=0).to(tl.float32)
        up = tl.load(gate_up + at + width, mask=is_inside, other=0).to(tl.float32)
        grad = tl.load(grad_output + row * width + column, mask=is_inside, other=0).to(tl.float32)
        silu, slope = silu_and_slope(gate)
        total += grad * silu * up
        grad = grad * weight
        grad_gate = grad * up * slope
        tl.store(grad_gate_up + at, grad_gate.to(grad_gate_up.dtype.element_ty), mask=is_inside)
        tl.store(grad_gate_up + at + width, (grad * silu).to(grad_gate_up.dtype.element_ty), mask=is_inside)
    tl.store(grad_weights + row, tl.sum(total, axis=0))
