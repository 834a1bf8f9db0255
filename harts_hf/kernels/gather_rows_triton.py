"""Gathers and segmented sums of rows in Triton. `gather_rows.py` and `row_sums.py` say what they compute."""

import torch
import triton
import triton.language as tl

from .row_sums import RowSums

TILE = 4096  # elements of a gather's tile
MAX_WIDTH = 1024  # columns of a tile


def gather(x: torch.Tensor, index: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """`x[index]` with zeros at negative indices, rounded to `dtype`.

    Args:
        x: `[C, ...]`, CUDA; rows may lie apart, such as in a slice of the last dim of `[C, D]`.
        index: `[M]`, int64.
        dtype: of the result; `x`'s if `None`.
    """
    x = with_whole_rows(x)
    width = x.shape[1:].numel()
    result = torch.empty(len(index), *x.shape[1:], dtype=dtype or x.dtype, device=x.device)
    if result.numel():
        block_d = min(triton.next_power_of_2(width), MAX_WIDTH)
        block_r = TILE // block_d
        grid = (triton.cdiv(len(index), block_r), triton.cdiv(width, block_d))
        _gather_kernel[grid](x, index, result, len(index), x.stride(0), width, BLOCK_R=block_r, BLOCK_D=block_d)
    return result


def with_whole_rows(x: torch.Tensor) -> torch.Tensor:
    """`x`, or a contiguous copy where its rows are not contiguous in themselves."""
    if x.is_contiguous() or (len(x) and x[0].is_contiguous()):
        return x
    return x.contiguous()


def sum_rows(values: torch.Tensor, sums: RowSums, dtype: torch.dtype) -> torch.Tensor:
    """Sums of the rows of `values` that each list of `sums` names, in fp32, rounded once.

    Args:
        values: `[M, ...]`, CUDA, contiguous.
        sums: lists into `values`.
        dtype: of the result `[C, ...]`.
    """
    width = values.shape[1:].numel()
    block_d = min(triton.next_power_of_2(width), MAX_WIDTH)
    for number, (offsets, entries) in enumerate(sums.stages):
        is_last = number + 1 == len(sums.stages)
        result_dtype = dtype if is_last else torch.float32
        result = torch.empty(len(offsets) - 1, *values.shape[1:], dtype=result_dtype, device=values.device)
        if result.numel():
            grid = (len(result), triton.cdiv(width, block_d))
            _sum_kernel[grid](values, offsets, entries, result, width, BLOCK_D=block_d)
        values = result
    return values


@triton.jit
def _gather_kernel(x, index, result, num_rows, row_stride, width, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """Grid (row tiles, column tiles); a program copies one tile. Rows and columns past the end are masked."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    source = tl.load(index + rows, mask=rows < num_rows, other=-1)
    in_width = columns < width
    tile = tl.load(x + source[:, None] * row_stride + columns, mask=(source >= 0)[:, None] & in_width, other=0)
    target = result + rows[:, None] * width + columns
    tl.store(target, tile.to(result.dtype.element_ty), mask=(rows < num_rows)[:, None] & in_width)


@triton.jit
def _sum_kernel(values, offsets, entries, result, width, BLOCK_D: tl.constexpr):
    """Grid (results, column tiles); a program walks one list. Columns past the end are masked."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_width = columns < width
    total = tl.zeros([BLOCK_D], dtype=tl.float32)
    for i in range(tl.load(offsets + row), tl.load(offsets + row + 1)):
        entry = tl.load(entries + i)
        total += tl.load(values + entry * width + columns, mask=in_width, other=0).to(tl.float32)
    tl.store(result + row * width + columns, total.to(result.dtype.element_ty), mask=in_width)
