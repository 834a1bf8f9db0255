"""The tree convolution in Triton, with its activation. `tree_conv.py` says what it computes.

The gradient of a row adds up its reads in a fixed order; the gradient of a weight adds up blocks of rows.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .gather_rows_triton import sum_rows
from .row_sums import RowSums
from .tree_conv import ConvLayout

BLOCK_D = 256
FORWARD_ROWS = 16
WEIGHT_ROWS = 256  # rows whose weight gradients one program adds


def run_tree_conv(
    x: torch.Tensor,  # [C, D], contiguous, in the weight's dtype
    weight: torch.Tensor,  # [D, W]
    bias: torch.Tensor | None,  # [D]
    layout: ConvLayout,
    *,
    use_silu: bool,
) -> torch.Tensor:
    """`[C, D]` in `x`'s dtype, differentiable in x, weight and bias. Sums are fp32."""
    return _TreeConv.apply(x, weight.contiguous(), bias, layout, use_silu)


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, layout: ConvLayout, use_silu: bool):
        output = torch.empty_like(x)
        if x.numel():
            _conv_forward_kernel[_grid(x, FORWARD_ROWS)](
                x,
                weight,
                x if bias is None else bias,
                layout.ancestors,
                output,
                len(x),
                D=x.shape[1],
                W=layout.width,
                BLOCK_R=FORWARD_ROWS,
                BLOCK_D=BLOCK_D,
                HAS_BIAS=bias is not None,
                SILU=use_silu,
            )
        ctx.save_for_backward(x, weight, bias)
        ctx.layout, ctx.use_silu = layout, use_silu
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output):
        x, weight, bias = ctx.saved_tensors
        num_blocks = triton.cdiv(len(x), WEIGHT_ROWS)
        d_linear = torch.empty_like(x)  # gradient before the activation
        d_taps = torch.empty(num_blocks, weight.shape[1] + 1, x.shape[1], dtype=torch.float32, device=x.device)
        if x.numel():
            _weight_kernel[_grid(x, WEIGHT_ROWS)](
                x,
                weight,
                x if bias is None else bias,
                ctx.layout.ancestors,
                d_output.contiguous(),
                d_linear,
                d_taps,
                len(x),
                D=x.shape[1],
                W=ctx.layout.width,
                TAPS=triton.next_power_of_2(ctx.layout.width),
                BLOCK_R=FORWARD_ROWS,
                ROWS=WEIGHT_ROWS,
                BLOCK_D=BLOCK_D,
                HAS_BIAS=bias is not None,
                SILU=ctx.use_silu,
            )
        d_taps = d_taps.sum(0)  # [W + 1, D], the bias last
        d_bias = None if bias is None else d_taps[-1].to(bias.dtype)
        return _sum_reads(d_linear, weight, ctx.layout.reads), d_taps[:-1].T.to(weight.dtype), d_bias, None, None


def _grid(x: torch.Tensor, rows: int) -> tuple[int, int]:
    return triton.cdiv(len(x), rows), triton.cdiv(x.shape[1], BLOCK_D)


def _sum_reads(d_linear: torch.Tensor, weight: torch.Tensor, reads: RowSums) -> torch.Tensor:
    """Gradient of the rows: each read's gradient times its tap, added up."""
    offsets, entries = reads.stages[0]
    is_last = len(reads.stages) == 1
    dtype = d_linear.dtype if is_last else torch.float32
    result = torch.empty(len(offsets) - 1, d_linear.shape[1], dtype=dtype, device=d_linear.device)
    if result.numel():
        grid = (len(result), triton.cdiv(d_linear.shape[1], 4 * BLOCK_D))
        _read_kernel[grid](
            d_linear,
            weight,
            offsets,
            entries,
            result,
            D=d_linear.shape[1],
            W=weight.shape[1],
            BLOCK_D=4 * BLOCK_D,
        )
    if is_last:
        return result
    return sum_rows(result, RowSums(reads.num_rows, reads.stages[1:]), d_linear.dtype)


@triton.jit
def _linear(
    x, weight, bias, ancestors, rows, m_r, columns, m_d, D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The convolution before its activation, fp32 `[rows, columns]`, rounded to `x`'s dtype."""
    total = tl.zeros([rows.shape[0], columns.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(W):
        source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
        mask = (source >= 0)[:, None] & m_d[None, :]
        value = tl.load(x + source[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weight + columns * W + tap, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _conv_forward_kernel(
    x,
    weight,
    bias,
    ancestors,
    output,
    num_rows,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (row tiles, column tiles); a program computes one tile. Rows and columns past the end are masked."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_r, m_d = rows < num_rows, columns < D
    linear = _linear(x, weight, bias, ancestors, rows, m_r, columns, m_d, D, W, HAS_BIAS)
    if SILU:
        linear = linear * tl.sigmoid(linear)
    target = output + rows[:, None] * D + columns[None, :]
    tl.store(target, linear.to(output.dtype.element_ty), mask=m_r[:, None] & m_d[None, :])


@triton.jit
def _weight_kernel(
    x,
    weight,
    bias,
    ancestors,
    d_output,
    d_linear,
    d_taps,
    num_rows,
    D: tl.constexpr,
    W: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (blocks of ROWS rows, column tiles): a program writes the gradient before the activation of its rows, and
    the sum over them of the gradients of the taps and the bias. Rows and columns past the end are masked."""
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = columns < D
    taps = tl.arange(0, TAPS)
    total = tl.zeros([TAPS, BLOCK_D], dtype=tl.float32)
    total_bias = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(0, ROWS, BLOCK_R):
        rows = block * ROWS + i + tl.arange(0, BLOCK_R)
        m_r = rows < num_rows
        mask = m_r[:, None] & m_d[None, :]
        o_rd = rows[:, None] * D + columns[None, :]
        grad = tl.load(d_output + o_rd, mask=mask, other=0.0).to(tl.float32)
        if SILU:
            linear = _linear(x, weight, bias, ancestors, rows, m_r, columns, m_d, D, W, HAS_BIAS)
            gate = tl.sigmoid(linear)
            grad = grad * gate * (1 + linear * (1 - gate))
        grad = grad.to(d_linear.dtype.element_ty)
        tl.store(d_linear + o_rd, grad, mask=mask)
        grad = grad.to(tl.float32)
        total_bias += tl.sum(grad, axis=0)
        for tap in tl.static_range(W):
            source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
            m_s = (source >= 0)[:, None] & m_d[None, :]
            value = tl.load(x + source[:, None] * D + columns[None, :], mask=m_s, other=0.0).to(tl.float32)
            total += tl.where((taps == tap)[:, None], tl.sum(grad * value, axis=0)[None, :], 0.0)
    base = d_taps + block * (W + 1) * D
    tl.store(base + taps[:, None] * D + columns[None, :], total, mask=(taps < W)[:, None] & m_d[None, :])
    tl.store(base + W * D + columns, total_bias, mask=m_d)


@triton.jit
def _read_kernel(d_linear, weight, offsets, entries, result, D: tl.constexpr, W: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (results, column tiles): a program adds the reads of one list. Columns past the end are masked."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_d = columns < D
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        entry = tl.load(entries + i)
        reader, tap = entry // W, entry % W
        grad = tl.load(d_linear + reader * D + columns, mask=m_d, other=0.0).to(tl.float32)
        total += grad * tl.load(weight + columns * W + tap, mask=m_d, other=0.0).to(tl.float32)
    tl.store(result + row * D + columns, total.to(result.dtype.element_ty), mask=m_d)
