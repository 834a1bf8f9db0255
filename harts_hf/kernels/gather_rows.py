"""Gather of rows whose gradient is added in a fixed order.

A row of a prefix tree is read several times: by every branch that replays it, by every child's convolution. Its
gradient is the sum over the reads. `index_select` adds them with atomics on CUDA, in an order that changes from run to
run, and in the tensor's own dtype; here the order is fixed and the sum is fp32.
"""

import torch
from torch.autograd.function import once_differentiable


def gather_rows(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`x[index]`, with zeros where `index` is negative.

    Args:
        x: `[C, ...]`, floating point.
        index: `[M]`, int64, rows of `x`; any negative number stands for a row of zeros. Repeats are allowed.

    Returns:
        `[M, ...]` in `x`'s dtype. The gradient of `x` is summed in fp32 (fp64 for fp64), always in the same order, and
        rounded once.
    """
    return _GatherRows.apply(x, index)


def add_rows(values: torch.Tensor, index: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Sum `values` into the rows that `index` names: the transpose of `gather_rows`.

    Args:
        values: `[M, ...]`, floating point.
        index: `[M]`, int64; values at a negative index are dropped.
        num_rows: C.

    Returns:
        `[C, ...]`, fp32 (fp64 for fp64 values). Addition is sorted on CUDA and sequential on the CPU, never atomic.
    """
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    width = values.shape[1:].numel()
    total = torch.zeros((num_rows + 1, width), dtype=dtype, device=values.device)
    values = values.reshape(len(values), width).to(dtype)
    index = torch.where(index < 0, num_rows, index)  # one row past the end takes what is dropped
    if values.is_cuda:
        total.index_put_((index,), values, accumulate=True)
    else:
        total.index_add_(0, index, values)
    return total[:num_rows]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index)
        ctx.shape, ctx.dtype = x.shape, x.dtype
        rows = x.index_select(0, index.clamp(min=0))
        return rows.masked_fill_((index < 0).view(-1, *(1,) * (x.dim() - 1)), 0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index,) = ctx.saved_tensors
        return add_rows(grad, index, ctx.shape[0]).view(ctx.shape).to(ctx.dtype), None
