"""`swiglu` of `swiglu.py` in Triton. All in fp32."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

BLOCK = 1024  # elements of a program


class Swiglu(torch.autograd.Function):
    """Of two tensors of one shape. The backward keeps both."""

    @staticmethod
    def forward(ctx, gate, up, dtype):
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        output = torch.empty(gate.shape, dtype=dtype, device=gate.device)
        if size := output.numel():
            _swiglu_forward_kernel[(triton.cdiv(size, BLOCK),)](gate, up, output, size, BLOCK=BLOCK)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate, up = ctx.saved_tensors
        grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
        if size := grad.numel():
            _swiglu_backward_kernel[(triton.cdiv(size, BLOCK),)](
                gate, up, grad.contiguous(), grad_gate, grad_up, size, BLOCK=BLOCK
            )
        return grad_gate, grad_up, None


@triton.jit
def _swiglu_forward_kernel(gate, up, output, size, BLOCK: tl.constexpr):
    """Grid (blocks of elements). Elements past `size` are masked."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    b_gate = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(output + at, (b_gate * tl.sigmoid(b_gate) * b_up).to(output.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(gate, up, grad, grad_gate, grad_up, size, BLOCK: tl.constexpr):
    """Grid (blocks of elements). Elements past `size` are masked."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < size
    b_gate = tl.load(gate + at, mask=mask, other=0.0).to(tl.float32)
    b_up = tl.load(up + at, mask=mask, other=0.0).to(tl.float32)
    b_grad = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    silu, slope = silu_and_slope(b_gate)
    tl.store(grad_gate + at, (b_grad * b_up * slope).to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + at, (b_grad * silu).to(grad_up.dtype.element_ty), mask=mask)


@triton.jit
def silu_and_slope(x):
    """`silu(x) = x sigmoid(x)` and its derivative."""
    sigmoid = tl.sigmoid(x)
    silu = x * sigmoid
    return silu, sigmoid + silu * (1 - sigmoid)
