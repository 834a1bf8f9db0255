"""What happens to one tile of logits in `log_probs.py`, in Triton: one pass over the tile each.

`log_probs_torch.py` says what is computed; arguments and results are the same. All arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl

from .log_probs_torch import SoftmaxSums, Transform

BLOCK = 2048  # columns that a program of the gradient holds
FOLD_BLOCK = 8192  # most that a program of the sums holds: each block costs reductions over all its threads


def fold_tile(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    transform: Transform,
    sums: SoftmaxSums,
    with_entropy: bool,
) -> None:
    """See `log_probs_torch.fold_tile`; `logits` must be contiguous and stay as they are."""
    num_rows, width = logits.shape
    block = min(FOLD_BLOCK, triton.next_power_of_2(width))
    _fold_kernel[(num_rows,)](
        logits, logits if bias is None else bias, columns, *sums, width,
        transform.logit_scale, transform.softcap or 1.0, 1 / transform.temperature,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=transform.softcap is not None, WITH_ENTROPY=with_entropy, BLOCK=block,
        num_warps=max(4, block // 512),
    )  # fmt: skip


def tile_gradient(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    transform: Transform,
    log_z: torch.Tensor,
    entropies: torch.Tensor | None,
    grad_log_probs: torch.Tensor | None,
    grad_entropies: torch.Tensor | None,
) -> torch.Tensor:
    """See `log_probs_torch.tile_gradient`; the result takes the place of `logits`."""
    num_rows, width = logits.shape
    per_row = (entropies, grad_log_probs, grad_entropies)
    _gradient_kernel[(num_rows, triton.cdiv(width, BLOCK))](
        logits, logits if bias is None else bias, columns, log_z, *(log_z if x is None else x for x in per_row), width,
        transform.logit_scale, transform.softcap or 1.0, 1 / transform.temperature,
        HAS_BIAS=bias is not None, HAS_SOFTCAP=transform.softcap is not None,
        OF_LOG_PROBS=grad_log_probs is not None, OF_ENTROPIES=grad_entropies is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return logits


@triton.jit
def _load_transformed(
    logits, bias, offset, column, is_inside, logit_scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One row's logits after bias, scale, cap and temperature, and the tanh of the cap; -inf past the last column."""
    x = tl.load(logits + offset + column, mask=is_inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        x += tl.load(bias + column, mask=is_inside, other=0.0).to(tl.float32)
        x = x.to(logits.dtype.element_ty).to(tl.float32)
    x *= logit_scale
    tanh = x
    if HAS_SOFTCAP:
        tanh = 1 - 2 / (1 + tl.exp(2 * (x / softcap)))
        x = softcap * tanh
    x *= inverse_temperature
    return tl.where(is_inside, x, float("-inf")), tanh


@triton.jit
def _fold_kernel(
    logits, bias, columns, largest_ptr, total_ptr, weighted_ptr, target_logit_ptr, width,
    logit_scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows): a program folds its row of the tile into the row's sums. Columns past `width` are masked."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(columns + row)
    largest = tl.load(largest_ptr + row)
    total = tl.load(total_ptr + row)
    weighted = tl.load(weighted_ptr + row)
    is_here = (target >= 0) & (target < width)
    # Both tanh are unused, and of different shapes: one name would change its type in the loop, which Triton refuses.
    target_logit, tanh_of_target = _load_transformed(
        logits, bias, row * width, target, is_here, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
    )
    tl.store(target_logit_ptr + row, target_logit, mask=is_here)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        is_inside = column < width
        x, tanh_of_block = _load_transformed(
            logits, bias, row * width, column, is_inside, logit_scale, softcap, inverse_temperature,
            HAS_BIAS, HAS_SOFTCAP,
        )  # fmt: skip
        new_largest = tl.maximum(largest, tl.max(x, axis=0))
        shrink = tl.exp(largest - new_largest)
        exp = tl.exp(x - new_largest)
        total = total * shrink + tl.sum(exp, axis=0)
        if WITH_ENTROPY:
            weighted = weighted * shrink + tl.sum(tl.where(is_inside, exp * x, 0.0), axis=0)
        largest = new_largest
    tl.store(largest_ptr + row, largest)
    tl.store(total_ptr + row, total)
    if WITH_ENTROPY:
        tl.store(weighted_ptr + row, weighted)


@triton.jit
def _gradient_kernel(
    logits, bias, columns, log_z_ptr, entropies, grad_log_probs, grad_entropies, width,
    logit_scale, softcap, inverse_temperature,
    HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OF_LOG_PROBS: tl.constexpr, OF_ENTROPIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Grid (rows, column blocks): a program turns its part of a row into its gradient, in place."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    x, tanh = _load_transformed(
        logits, bias, row * width, column, is_inside, logit_scale, softcap, inverse_temperature, HAS_BIAS, HAS_SOFTCAP
    )
    log_p = x - tl.load(log_z_ptr + row)
    p = tl.exp(log_p)
    grad = tl.zeros_like(p)
    if OF_ENTROPIES:  # d entropy / d logit_j = -p_j (log p_j + entropy)
        grad -= tl.where(is_inside, (log_p + tl.load(entropies + row)) * p, 0.0) * tl.load(grad_entropies + row)
    if OF_LOG_PROBS:  # d log p_t / d logit_j = [j = t] - p_j
        grad += (tl.where(column == tl.load(columns + row), 1.0, 0.0) - p) * tl.load(grad_log_probs + row)
    if HAS_SOFTCAP:
        grad *= 1 - tanh * tanh
    grad *= logit_scale * inverse_temperature
    tl.store(logits + row * width + column, grad.to(logits.dtype.element_ty), mask=is_inside)
