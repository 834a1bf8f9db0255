"""`rms_norm` of `rms_norm.py` in Triton. All in fp32; the weight's gradient is summed in a fixed order."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .gather_rows_triton import with_whole_rows

TILE = 4096  # elements of a program's tile
PROGRAMS = 1024  # of the backward at most; each leaves a part of the weight's gradient


class RMSNorm(torch.autograd.Function):
    """Of rows `[C, D]`, with a gate of that shape or None. The backward keeps `x`, the gate and `[C]` in fp32."""

    @staticmethod
    def forward(ctx, x, weight, gate, epsilon, zero_centered, activation, dtype):
        x = with_whole_rows(x)
        gate = None if gate is None else with_whole_rows(gate)
        num_rows, dim = x.shape
        y = torch.empty(num_rows, dim, dtype=dtype, device=x.device)
        rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        ctx.options = {"D": dim, "ZERO_CENTERED": zero_centered, "ACTIVATION": activation, **_blocks(dim)}
        if y.numel():
            _rms_norm_forward_kernel[(triton.cdiv(num_rows, ctx.options["BT"]),)](
                x,
                weight.contiguous(),
                gate,
                y,
                rstd,
                x.stride(0),
                0 if gate is None else gate.stride(0),
                num_rows,
                epsilon,
                num_warps=_warps(4, dim),
                **ctx.options,
            )
        ctx.save_for_backward(x, weight, gate, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, gate, rstd = ctx.saved_tensors
        grad = with_whole_rows(grad)
        num_rows, dim = x.shape
        grad_x = torch.empty(num_rows, dim, dtype=x.dtype, device=x.device)
        grad_gate = None if gate is None else torch.empty(num_rows, dim, dtype=gate.dtype, device=x.device)
        num_tiles = triton.cdiv(num_rows, ctx.options["BT"])
        tiles = max(1, triton.cdiv(num_tiles, PROGRAMS))
        programs = triton.cdiv(num_tiles, tiles)
        parts = None
        if ctx.needs_input_grad[1]:
            parts = torch.empty(programs, dim, dtype=torch.float32, device=x.device)
        if programs:
            _rms_norm_backward_kernel[(programs,)](
                x,
                weight.contiguous(),
                gate,
                rstd,
                grad,
                grad_x,
                grad_gate,
                parts,
                x.stride(0),
                0 if gate is None else gate.stride(0),
                grad.stride(0),
                num_rows,
                tiles,
                WITH_WEIGHT=parts is not None,
                num_warps=_warps(8, dim),
                **ctx.options,
            )
        grad_weight = None if parts is None else parts.sum(0).to(weight.dtype)
        return grad_x, grad_weight, grad_gate, None, None, None, None


def _blocks(dim: int) -> dict[str, int]:
    block_d = triton.next_power_of_2(dim)
    return {"BT": max(1, TILE // block_d), "BD": block_d}


def _warps(of_a_tile: int, dim: int) -> int:
    return min(16, of_a_tile * max(1, triton.next_power_of_2(dim) // TILE))


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_forward_kernel(
    x,
    weight,
    gate,
    y,
    rstd,
    x_stride,
    gate_stride,
    num_rows,
    epsilon,
    D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (row tiles); a program owns BT whole rows. Rows and channels past an end are masked."""
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channels = tl.arange(0, BD)
    m_t = rows < num_rows
    mask = m_t[:, None] & (channels < D)[None, :]
    tile = tl.load(x + rows[:, None] * x_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(tile * tile, 1) / D + epsilon)
    factor = tl.load(weight + channels, mask=channels < D, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1
    result = tile * scale[:, None] * factor[None, :]
    if ACTIVATION is not None:
        b_gate = tl.load(gate + rows[:, None] * gate_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        result *= tl.sigmoid(b_gate)
        if ACTIVATION == "silu":
            result *= b_gate
    tl.store(y + rows[:, None] * D + channels[None, :], result.to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + rows, scale, mask=m_t)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _rms_norm_backward_kernel(
    x,
    weight,
    gate,
    rstd,
    grad,
    grad_x,
    grad_gate,
    parts,
    x_stride,
    gate_stride,
    grad_stride,
    num_rows,
    tiles,
    WITH_WEIGHT: tl.constexpr,
    D: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (groups of `tiles` row tiles); a program leaves its rows' sum of the weight's gradient in `parts`."""
    program = tl.program_id(0).to(tl.int64)
    channels = tl.arange(0, BD)
    m_d = channels < D
    factor = tl.load(weight + channels, mask=m_d, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        factor += 1
    total = tl.zeros([BT, BD], dtype=tl.float32)
    for i in range(tiles):
        rows = (program * tiles + i) * BT + tl.arange(0, BT)
        m_t = rows < num_rows
        mask = m_t[:, None] & m_d[None, :]
        scale = tl.load(rstd + rows, mask=m_t, other=0.0)
        unit = tl.load(x + rows[:, None] * x_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        unit *= scale[:, None]
        b_grad = tl.load(grad + rows[:, None] * grad_stride + channels[None, :], mask=mask, other=0.0).to(tl.float32)
        target = rows[:, None] * D + channels[None, :]
        if ACTIVATION is not None:
            b_gate = tl.load(gate + rows[:, None] * gate_stride + channels[None, :], mask=mask, other=0.0)
            b_gate = b_gate.to(tl.float32)
            sigmoid = tl.sigmoid(b_gate)
            slope = sigmoid * (1 - sigmoid)
            value = sigmoid
            if ACTIVATION == "silu":
                slope = sigmoid + b_gate * slope
                value = b_gate * sigmoid
            d_gate = b_grad * unit * factor[None, :] * slope
            tl.store(grad_gate + target, d_gate.to(grad_gate.dtype.element_ty), mask=mask)
            b_grad *= value
        if WITH_WEIGHT:
            total += b_grad * unit
        b_grad *= factor[None, :]
        d_x = (b_grad - unit * (tl.sum(b_grad * unit, 1) / D)[:, None]) * scale[:, None]
        tl.store(grad_x + target, d_x.to(grad_x.dtype.element_ty), mask=mask)
    if WITH_WEIGHT:
        tl.store(parts + program * D + channels, tl.sum(total, 0), mask=m_d)
