"""The tree convolution in Triton, with its activation. `tree_conv.py` says what it computes.

The gradient of a row adds up its reads in a fixed order; the gradient of a weight adds up blocks of rows.
"""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from .conv_layout import ConvLayout
from .gather_rows_triton import sum_rows
from .row_sums import RowSums

BLOCK_D = 256
FORWARD_ROWS = 16
WEIGHT_BLOCK_ROWS = 8  # of a tile beside the sums of its taps
WEIGHT_ROWS = 256  # rows whose weight gradients one program adds
TAPS = 4  # of whose gradients one program of `_weight_kernel` has sums


def run_tree_conv(
    x: torch.Tensor,  # [C, D], contiguous, in the weight's dtype, or in any where the weight is fp32
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
        d_linear = torch.empty_like(x, dtype=weight.dtype)  # gradient before the activation
        d_taps = torch.empty(num_blocks, weight.shape[1] + 1, x.shape[1], dtype=torch.float32, device=x.device)
        if x.numel():
            grid = (*_grid(x, WEIGHT_ROWS), triton.cdiv(ctx.layout.width, TAPS))
            _weight_kernel[grid](
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
                BLOCK_R=WEIGHT_BLOCK_ROWS,
                ROWS=WEIGHT_ROWS,
                BLOCK_D=BLOCK_D,
                HAS_BIAS=bias is not None,
                SILU=ctx.use_silu,
            )
        d_taps = d_taps.sum(0)  # [W + 1, D], the bias last
        d_bias = None if bias is None else d_taps[-1].to(bias.dtype)
        d_x = _sum_reads(d_linear, weight, ctx.layout.reads, x.dtype)
        return d_x, d_taps[:-1].T.to(weight.dtype), d_bias, None, None


def _grid(x: torch.Tensor, rows: int) -> tuple[int, int]:
    return triton.cdiv(len(x), rows), triton.cdiv(x.shape[1], BLOCK_D)


def _sum_reads(d_linear: torch.Tensor, weight: torch.Tensor, reads: RowSums, dtype: torch.dtype) -> torch.Tensor:
    """Gradient of the rows: each read's gradient times its tap, added up and rounded once."""
    offsets, entries = reads.stages[0]
    is_last = len(reads.stages) == 1
    result_dtype = dtype if is_last else torch.float32
    result = torch.empty(len(offsets) - 1, d_linear.shape[1], dtype=result_dtype, device=d_linear.device)
    if result.numel():
        _read_kernel[_grid(result, FORWARD_ROWS)](
            d_linear,
            weight.t().contiguous(),
            offsets,
            entries,
            result,
            len(result),
            D=d_linear.shape[1],
            W=weight.shape[1],
            BLOCK_R=FORWARD_ROWS,
            BLOCK_D=BLOCK_D,
        )
    if is_last:
        return result
    return sum_rows(result, RowSums(reads.num_rows, reads.stages[1:]), dtype)


@triton.jit
def _linear(
    x, weight, bias, ancestors, rows, m_r, columns, m_d, D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The convolution before its activation, fp32 `[rows, columns]`, rounded to `weight`'s dtype."""
    total = tl.zeros([rows.shape[0], columns.shape[0]], dtype=tl.float32)
    for tap in tl.static_range(W):
        source = tl.load(ancestors + rows * W + tap, mask=m_r, other=-1)
        mask = (source >= 0)[:, None] & m_d[None, :]
        value = tl.load(x + source[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += value * tl.load(weight + columns * W + tap, mask=m_d, other=0.0).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + columns, mask=m_d, other=0.0).to(tl.float32)[None, :]
    return total.to(weight.dtype.element_ty).to(tl.float32)


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
def _read_tap(x, ancestors, rows, m_r, columns, m_d, tap, D: tl.constexpr, W: tl.constexpr):
    """What a tap reads for each row, fp32; zeros before the trajectory's start and for a tap past the last."""
    source = tl.load(ancestors + rows * W + tap, mask=m_r & (tap < W), other=-1)
    mask = (source >= 0)[:, None] & m_d[None, :]
    return tl.load(x + source[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)


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
    BLOCK_R: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):
    """Grid (blocks of ROWS rows, column tiles, fours of taps): a program writes the sums over its rows of the
    gradients of its taps; the first of a block also the sum of the bias's and, for each row, the gradient before the
    activation. Rows and columns past the end are masked."""
    block = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.program_id(2) * 4
    m_d = columns < D
    # Sums stay apart for each row of a tile until the end: one reduction over threads instead of one a tile.
    total_0 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    total_1 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    total_2 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    total_3 = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    total_bias = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
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
        if first == 0:
            tl.store(d_linear + o_rd, grad, mask=mask)
        grad = grad.to(tl.float32)
        if HAS_BIAS:
            total_bias += grad
        total_0 += grad * _read_tap(x, ancestors, rows, m_r, columns, m_d, first, D, W)
        total_1 += grad * _read_tap(x, ancestors, rows, m_r, columns, m_d, first + 1, D, W)
        total_2 += grad * _read_tap(x, ancestors, rows, m_r, columns, m_d, first + 2, D, W)
        total_3 += grad * _read_tap(x, ancestors, rows, m_r, columns, m_d, first + 3, D, W)
    base = d_taps + block * (W + 1) * D + columns
    tl.store(base + first * D, tl.sum(total_0, axis=0), mask=m_d)
    tl.store(base + (first + 1) * D, tl.sum(total_1, axis=0), mask=m_d & (first + 1 < W))
    tl.store(base + (first + 2) * D, tl.sum(total_2, axis=0), mask=m_d & (first + 2 < W))
    tl.store(base + (first + 3) * D, tl.sum(total_3, axis=0), mask=m_d & (first + 3 < W))
    tl.store(base + W * D, tl.sum(total_bias, axis=0), mask=m_d & (first == 0))


@triton.jit
def _read_kernel(
    d_linear,
    taps,  # [W, D]
    offsets,
    entries,
    result,
    num_results,
    D: tl.constexpr,
    W: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Grid (result tiles, column tiles): a program adds the reads of its tile's lists, all lists side by side.
    Results and columns past the end are masked."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    m_r, m_d = rows < num_results, columns < D
    begins = tl.load(offsets + rows, mask=m_r, other=0)
    lengths = tl.load(offsets + rows + 1, mask=m_r, other=0) - begins
    total = tl.zeros([BLOCK_R, BLOCK_D], dtype=tl.float32)
    for i in range(tl.max(lengths, axis=0)):
        m_i = i < lengths
        entry = tl.load(entries + begins + i, mask=m_i, other=0)
        reader, tap = entry // W, entry % W
        mask = m_i[:, None] & m_d[None, :]
        grad = tl.load(d_linear + reader[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        total += grad * tl.load(taps + tap[:, None] * D + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    target = result + rows[:, None] * D + columns[None, :]
    tl.store(target, total.to(result.dtype.element_ty), mask=m_r[:, None] & m_d[None, :])
