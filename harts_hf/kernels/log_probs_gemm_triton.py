"""The projection of `log_probs.py` fused with what happens to its tiles, in Triton for compute capability 9.0.

The forward writes no logits: the product's epilogue reduces each block of columns to its sums, 8 or 12 bytes a row,
which `_merge_kernel` adds up in a fixed order. The backward's epilogue turns the logits into their gradient before
they are written. Both round the logits to the operands' dtype first, as the unfused projection does, and both add up
the products in the same order, so that forward and backward see the same logits.

`log_probs_torch.py` says what is computed. Operands are bf16 or fp16 and read by TMA, whose rows start at multiples of
16 bytes: D is a multiple of 8. Sums are fp32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from .log_probs_torch import SoftmaxSums, Transform

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
MERGE_ROWS = 32  # rows of a program of the merge
MERGE_BLOCKS = 32  # column blocks that it reads at a time


@dataclass(frozen=True)
class Schedule:
    """How a product is cut into programs.

    Attributes:
        rows, columns, depth: of a program's block of the product; depth is what one step multiplies.
        group: blocks of rows that take turns before the next block of columns, for reuse in L2.
        programs_per_processor: of the persistent grid; 0 for one program per block.
        slices: parts of the epilogue of the gradient, which hold less shared memory the more there are: 1 or 2.
        warps, stages: of Triton's launch.
    """

    rows: int = 128
    columns: int = 256
    depth: int = 64
    group: int = 16
    programs_per_processor: int = 1
    slices: int = 2
    warps: int = 8
    stages: int = 3

    def launch(self, num_rows: int, width: int, device: torch.device) -> tuple[tuple[int], dict]:
        """Grid and keyword arguments of a kernel over a `[num_rows, width]` product."""
        programs = triton.cdiv(num_rows, self.rows) * triton.cdiv(width, self.columns)
        if self.programs_per_processor and device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
            programs = min(programs, processors * self.programs_per_processor)
        return (programs,), {
            "BLOCK_ROWS": self.rows, "BLOCK_COLUMNS": self.columns, "BLOCK_DEPTH": self.depth, "GROUP": self.group,
            "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip

    def operands(self, hidden: torch.Tensor, weight: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Descriptors of both operands' blocks."""
        return (
            TensorDescriptor.from_tensor(hidden.contiguous(), [self.rows, self.depth]),
            TensorDescriptor.from_tensor(weight.contiguous(), [self.columns, self.depth]),
        )


FORWARD = Schedule()
BACKWARD = Schedule(columns=128, warps=4, programs_per_processor=2)


def fold_product(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    transform: Transform,
    sums: SoftmaxSums,
    with_entropy: bool,
    schedule: Schedule = FORWARD,
) -> None:
    """`fold_tile(hidden @ weight.t(), ...)` of `log_probs_torch.py`, without the product in memory.

    Args:
        hidden: `[R, D]`, bf16 or fp16, D a multiple of 8.
        weight: `[E, D]`, in `hidden`'s dtype.
        bias, columns, transform, sums, with_entropy: as in `fold_tile`.
        schedule: of the product.
    """
    num_rows, width = len(hidden), len(weight)
    blocks = triton.cdiv(width, schedule.columns)
    parts = hidden.new_empty(3 if with_entropy else 2, blocks, num_rows, dtype=torch.float32)
    grid, launch = schedule.launch(num_rows, width, hidden.device)
    _sums_kernel[grid](
        *schedule.operands(hidden, weight), hidden if bias is None else bias, columns, parts, sums.target_logit,
        blocks * num_rows, num_rows, width, hidden.shape[1], *_factors(transform),
        HAS_BIAS=bias is not None, IS_SCALED=_is_scaled(transform), HAS_SOFTCAP=transform.softcap is not None,
        WITH_ENTROPY=with_entropy, IS_FULL=width % schedule.columns == 0, **launch,
    )  # fmt: skip
    _merge_kernel[(triton.cdiv(num_rows, MERGE_ROWS),)](
        parts, sums.largest, sums.total, sums.weighted, num_rows, blocks, blocks * num_rows,
        WITH_ENTROPY=with_entropy, ROWS=MERGE_ROWS, BLOCKS=MERGE_BLOCKS,
    )  # fmt: skip


def product_gradient(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    transform: Transform,
    log_z: torch.Tensor,
    entropies: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropies: torch.Tensor | None,
    buffer: torch.Tensor,
    schedule: Schedule = BACKWARD,
) -> torch.Tensor:
    """`tile_gradient(hidden @ weight.t(), ...)` of `log_probs_torch.py`.

    Args:
        hidden, weight: as in `fold_product`.
        bias, columns, transform, log_z, entropies, grad_log_probs, grad_entropies: as in `tile_gradient`.
        buffer: memory for the result, at least R * (E rounded up to a multiple of 8) elements of `hidden`'s dtype.
        schedule: of the product.

    Returns:
        `[R, E]` in `buffer`, whose rows are a multiple of 8 elements apart.
    """
    num_rows, width = len(hidden), len(weight)
    stride = triton.cdiv(width, 8) * 8
    grad = buffer[: num_rows * stride].view(num_rows, stride)[:, :width]
    per_row = (entropies, grad_log_probs, grad_entropies)
    grid, launch = schedule.launch(num_rows, width, hidden.device)
    _gradient_kernel[grid](
        *schedule.operands(hidden, weight),
        TensorDescriptor.from_tensor(grad, [schedule.rows, schedule.columns // schedule.slices]),
        hidden if bias is None else bias, columns, log_z, *(log_z if x is None else x for x in per_row),
        num_rows, width, hidden.shape[1], *_factors(transform), transform.logit_scale / transform.temperature,
        HAS_BIAS=bias is not None, IS_SCALED=_is_scaled(transform), HAS_SOFTCAP=transform.softcap is not None,
        OF_LOG_PROBS=grad_log_probs is not None, OF_ENTROPIES=grad_entropies is not None, SLICES=schedule.slices,
        **launch,
    )  # fmt: skip
    return grad


def _factors(transform: Transform) -> tuple[float, float]:
    """Of the logits before the tanh, and of its result. Without a cap the first is all."""
    if transform.softcap is None:
        return transform.logit_scale / transform.temperature, 1.0
    return transform.logit_scale / transform.softcap, transform.softcap / transform.temperature


def _is_scaled(transform: Transform) -> bool:
    return _factors(transform)[0] != 1.0


@triton.jit
def _position(block, num_rows, width, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """Block of rows and block of columns of the block-th product: groups of rows, in each columns before rows."""
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    per_group = GROUP * tl.cdiv(width, BLOCK_COLUMNS)
    first = block // per_group * GROUP
    in_group = tl.minimum(row_blocks - first, GROUP)
    within = block % per_group
    return first + within % in_group, within // in_group


@triton.jit
def _transformed(
    total, bias, first_column, width, scale_in, scale_out, DTYPE: tl.constexpr,
    HAS_BIAS: tl.constexpr, IS_SCALED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Logits of the products `[rows, columns]` after rounding, bias, scale, cap and temperature; the cap's tanh."""
    x = total.to(DTYPE).to(tl.float32)
    if HAS_BIAS:
        column = first_column + tl.arange(0, total.shape[1])
        x += tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)[None, :]
        x = x.to(DTYPE).to(tl.float32)
    if IS_SCALED:
        x *= scale_in
    tanh = x
    if HAS_SOFTCAP:
        tanh = 1 - 2 / (1 + tl.exp2(x * (2 * LOG2_E)))
        x = tanh * scale_out
    return x, tanh


@triton.jit
def _column_of_target(columns, row, is_row, first_column, width, BLOCK: tl.constexpr):
    """Column of each row's target in the block of columns from `first_column` on, int32; -1 if it is elsewhere."""
    column = tl.load(columns + row, mask=is_row, other=-1)
    is_here = (column >= first_column) & (column < tl.minimum(first_column + BLOCK, width))
    return tl.where(is_here, column - first_column, -1).to(tl.int32)


@triton.jit
def _sums_kernel(
    hidden, weight, bias, columns, parts, target_logit, part_size, num_rows, width, dim, scale_in, scale_out,
    HAS_BIAS: tl.constexpr, IS_SCALED: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr,
    IS_FULL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs), persistent: each block of the product becomes three numbers a row, and the targets' logits.

    Columns past `width` are masked unless `IS_FULL`; rows past `num_rows` are not stored.
    """
    row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    column_blocks = tl.cdiv(width, BLOCK_COLUMNS)
    # Flattened, the next block's loads start during the epilogue.
    for block in tl.range(tl.program_id(0), row_blocks * column_blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = _position(block, num_rows, width, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
        first_row, first_column = row_block * BLOCK_ROWS, column_block * BLOCK_COLUMNS
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for k in range(0, dim, BLOCK_DEPTH):
            total = tl.dot(hidden.load([first_row, k]), weight.load([first_column, k]).T, total)

        row = first_row + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        column = tl.arange(0, BLOCK_COLUMNS)[None, :]
        x, tanh = _transformed(
            total, bias, first_column, width, scale_in, scale_out, hidden.dtype, HAS_BIAS, IS_SCALED, HAS_SOFTCAP
        )
        target = _column_of_target(columns, row, is_row, first_column, width, BLOCK_COLUMNS)
        if tl.max(target, axis=0) >= 0:  # few blocks have a target
            found = tl.sum(tl.where(column == target[:, None], x, 0.0), axis=1)
            tl.store(target_logit + row, found, mask=target >= 0)
        if not IS_FULL:
            x = tl.where(column < width - first_column, x, float("-inf"))
        largest = tl.max(x, axis=1)
        exp = tl.exp2(x * LOG2_E - (largest * LOG2_E)[:, None])
        part = parts + column_block.to(tl.int64) * num_rows + row
        tl.store(part, largest, mask=is_row)
        tl.store(part + part_size, tl.sum(exp, axis=1), mask=is_row)
        if WITH_ENTROPY:
            weighted = exp * x
            if not IS_FULL:
                weighted = tl.where(column < width - first_column, weighted, 0.0)
            tl.store(part + part_size + part_size, tl.sum(weighted, axis=1), mask=is_row)


@triton.jit
def _merge_kernel(
    parts, largest_ptr, total_ptr, weighted_ptr, num_rows, column_blocks, part_size,
    WITH_ENTROPY: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of rows): a program folds the parts of its rows into their sums, some column blocks at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_rows
    largest = tl.load(largest_ptr + row, mask=is_row, other=0.0)
    total = tl.load(total_ptr + row, mask=is_row, other=0.0)
    weighted = tl.load(weighted_ptr + row, mask=is_row, other=0.0)
    for begin in range(0, column_blocks, BLOCKS):
        block = begin + tl.arange(0, BLOCKS)[:, None]
        part = parts + block.to(tl.int64) * num_rows + row[None, :]
        is_part = (block < column_blocks) & is_row[None, :]
        largest_parts = tl.load(part, mask=is_part, other=float("-inf"))
        new_largest = tl.maximum(largest, tl.max(largest_parts, axis=0))
        shrink = tl.exp(largest - new_largest)
        factor = tl.exp(largest_parts - new_largest[None, :])
        total = total * shrink + tl.sum(factor * tl.load(part + part_size, mask=is_part, other=0.0), axis=0)
        if WITH_ENTROPY:
            weighted_parts = tl.load(part + part_size + part_size, mask=is_part, other=0.0)
            weighted = weighted * shrink + tl.sum(factor * weighted_parts, axis=0)
        largest = new_largest
    tl.store(largest_ptr + row, largest, mask=is_row)
    tl.store(total_ptr + row, total, mask=is_row)
    if WITH_ENTROPY:
        tl.store(weighted_ptr + row, weighted, mask=is_row)


@triton.jit
def _gradient_kernel(
    hidden, weight, grad, bias, columns, log_z_ptr, entropies, grad_log_probs, grad_entropies,
    num_rows, width, dim, scale_in, scale_out, scale_of_gradient,
    HAS_BIAS: tl.constexpr, IS_SCALED: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    OF_LOG_PROBS: tl.constexpr, OF_ENTROPIES: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_DEPTH: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Grid (programs), persistent: each block of the product becomes the gradient of its logits.

    Rows past `num_rows` and columns past `width` are not written.
    """
    blocks = tl.cdiv(num_rows, BLOCK_ROWS) * tl.cdiv(width, BLOCK_COLUMNS)
    for block in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
        row_block, column_block = _position(block, num_rows, width, BLOCK_ROWS, BLOCK_COLUMNS, GROUP)
        first_row, first_column = row_block * BLOCK_ROWS, column_block * BLOCK_COLUMNS
        total = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        for k in range(0, dim, BLOCK_DEPTH):
            total = tl.dot(hidden.load([first_row, k]), weight.load([first_column, k]).T, total)

        if SLICES == 1:
            slices = (total,)
        else:
            slices = tl.split(tl.permute(tl.reshape(total, (BLOCK_ROWS, 2, BLOCK_COLUMNS // 2)), (0, 2, 1)))
        row = first_row + tl.arange(0, BLOCK_ROWS)
        is_row = row < num_rows
        log_z = tl.load(log_z_ptr + row, mask=is_row, other=0.0)
        for i in tl.static_range(SLICES):
            first = first_column + i * (BLOCK_COLUMNS // SLICES)
            x, tanh = _transformed(
                slices[i], bias, first, width, scale_in, scale_out, hidden.dtype, HAS_BIAS, IS_SCALED, HAS_SOFTCAP
            )
            column = tl.arange(0, BLOCK_COLUMNS // SLICES)[None, :]
            log2_p = x * LOG2_E - (log_z * LOG2_E)[:, None]
            p = tl.exp2(log2_p)
            slope = tl.zeros_like(p)
            if OF_ENTROPIES:  # d entropy / d logit_j = -p_j (log p_j + entropy)
                entropy = tl.load(entropies + row, mask=is_row, other=0.0)
                factor = -scale_of_gradient * tl.load(grad_entropies + row, mask=is_row, other=0.0)
                slope += (log2_p * LN_2 + entropy[:, None]) * p * factor[:, None]
            if OF_LOG_PROBS:  # d log p_t / d logit_j = [j = t] - p_j
                target = _column_of_target(columns, row, is_row, first, width, BLOCK_COLUMNS // SLICES)
                factor = scale_of_gradient * tl.load(grad_log_probs + row, mask=is_row, other=0.0)
                slope += (tl.where(column == target[:, None], 1.0, 0.0) - p) * factor[:, None]
            if HAS_SOFTCAP:
                slope *= 1 - tanh * tanh
            grad.store([first_row, first], slope.to(hidden.dtype))
