"""L2 norm of query and key heads as their rows are gathered, and its gradient as rows are summed, in Triton.

A pass over memory less in each direction than a gather and a norm apart. The norm is that of `use_qk_l2norm`:
y = x / sqrt(sum of squares + 1e-6), in fp32, rounded once.
"""

import torch
import triton
import triton.language as tl

from .gather_rows_triton import sum_rows, with_whole_rows
from .row_sums import RowSums

EPSILON = 1e-6
TILE = 4096  # elements of a program's tile


def gather_normalized(x: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`x[index]` with every head divided by its norm, and the reciprocal norms.

    Args:
        x: `[C, H, K]`, CUDA; rows may lie apart.
        index: `[M]`, int64, all >= 0.

    Returns:
        `[M, H, K]` in `x`'s dtype, and `[M, H]` in fp32.
    """
    x = with_whole_rows(x)
    num_heads, dim = x.shape[1:]
    y = x.new_empty(len(index), num_heads, dim)
    rstd = torch.empty(len(index), num_heads, dtype=torch.float32, device=x.device)
    block_d = triton.next_power_of_2(dim)
    block_t = max(1, TILE // block_d)
    if y.numel():
        _gather_normalized_kernel[(triton.cdiv(len(index) * num_heads, block_t),)](
            x, index, y, rstd, len(index) * num_heads, x.stride(0), EPSILON, H=num_heads, D=dim, BT=block_t, BD=block_d
        )
    return y, rstd


def sum_normalized_gradients(
    d_y: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor, positions: torch.Tensor, sums: RowSums
) -> torch.Tensor:
    """Gradients of rows that `gather_normalized` read: sums of `d_y` through the norm, in fp32, rounded once.

    Args:
        d_y: `[M, H G, K]`, CUDA, contiguous; the G gradients of a head, side by side, add up.
        y: `[M, H, K]`, normalised heads; rstd: `[M, H]`, fp32.
        positions: `[C]`, int64: an entry of `y` that holds each row.
        sums: entries of `d_y` of each row.

    Returns:
        `[C, H, K]` in `y`'s dtype.
    """
    offsets, entries = sums.stages[-1]
    d_y = sum_rows(d_y, RowSums(len(entries), sums.stages[:-1]), torch.float32)  # as it is if there is one stage
    num_heads, dim = y.shape[1:]
    result = y.new_empty(len(positions), num_heads, dim)
    block_d = triton.next_power_of_2(dim)
    block_h = min(triton.next_power_of_2(num_heads), max(1, TILE // block_d))
    if result.numel():
        _sum_gradient_kernel[(len(positions), triton.cdiv(num_heads, block_h))](
            d_y,
            y,
            rstd,
            positions,
            offsets,
            entries,
            result,
            H=num_heads,
            G=d_y.shape[1] // num_heads,
            D=dim,
            BH=block_h,
            BD=block_d,
        )
    return result


@triton.jit
def _gather_normalized_kernel(
    x,
    index,
    y,
    rstd,
    num_vectors,
    row_stride,
    epsilon,
    H: tl.constexpr,
    D: tl.constexpr,
    BT: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (vector tiles); a program owns BT heads of consecutive tokens. What is past an end is masked."""
    vectors = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    channels = tl.arange(0, BD)
    m_t = vectors < num_vectors
    mask = m_t[:, None] & (channels < D)[None, :]
    source = tl.load(index + vectors // H, mask=m_t, other=0) * row_stride + vectors % H * D
    tile = tl.load(x + source[:, None] + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(tile * tile, 1) + epsilon)
    tl.store(y + vectors[:, None] * D + channels[None, :], (tile * scale[:, None]).to(y.dtype.element_ty), mask=mask)
    tl.store(rstd + vectors, scale, mask=m_t)


@triton.jit
def _sum_gradient_kernel(
    d_y,
    y,
    rstd,
    positions,
    offsets,
    entries,
    result,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
):
    """Grid (rows, head tiles); a program walks one row's entries. Heads and channels past the end are masked."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BH + tl.arange(0, BH)
    channels = tl.arange(0, BD)
    m_h = heads < H
    mask = m_h[:, None] & (channels < D)[None, :]
    total = tl.zeros([BH, BD], dtype=tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        entry = tl.load(entries + i) * H * G
        for j in tl.static_range(G):
            source = entry + heads * G + j
            total += tl.load(d_y + source[:, None] * D + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    source = tl.load(positions + row) * H + heads
    unit = tl.load(y + source[:, None] * D + channels[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(rstd + source, mask=m_h, other=0.0)
    gradient = (total - tl.sum(total * unit, 1)[:, None] * unit) * scale[:, None]
    target = result + (row * H + heads)[:, None] * D + channels[None, :]
    tl.store(target, gradient.to(result.dtype.element_ty), mask=mask)
