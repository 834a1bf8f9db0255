"""What a mixture of experts does around its grouped matrix products, with few passes over its rows.

A token that goes to k experts is k rows, sorted by expert. Indexing with a permutation has a permutation as its
gradient, and the gradient of a token is the sum of those of its k rows, which stand at known places: nothing is
scattered, sums are fp32 in a fixed order. The routing weight is applied between the two products, where rows are
narrow, in the pass that applies SwiGLU. Triton on CUDA, torch elsewhere.
"""

import torch
from torch.autograd.function import once_differentiable


def spread_rows(x: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Each token's row for each of its experts, sorted by expert.

    Args:
        x: `[C, D]`.
        order: `[S]`, int64, S = C k: the pair (token, choice), as token * k + choice, of each sorted row.
        places: `[C, k]`, int64: the sorted row of each pair, the inverse of `order`.

    Returns:
        `[S, D]`; the gradient of `x` is summed in fp32 (fp64 for fp64 on the CPU) and rounded once.
    """
    return _SpreadRows.apply(x, order, places)


def add_choices(rows: torch.Tensor, order: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The sum of each token's rows: the transpose of [`spread_rows`].

    Args:
        rows: `[S, D]`, sorted by expert.
        order, places: as for `spread_rows`.

    Returns:
        `[C, D]`, summed in fp32 (fp64 for fp64 on the CPU) and rounded once to `rows`' dtype.
    """
    return _AddChoices.apply(rows, order, places)


def weighted_swiglu(gate_up: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`weights * silu(gate) * up` per row.

    Args:
        gate_up: `[S, 2 I]`, gates and then ups.
        weights: `[S]`, fp32 (fp64 for fp64 `gate_up`).

    Returns:
        `[S, I]` in `gate_up`'s dtype, computed in fp32 (fp64 for fp64 on the CPU) and rounded once. Differentiable
        in both.
    """
    return _WeightedSwiglu.apply(gate_up, weights)


def _spread(x, order, places):
    tokens = order // places.shape[1]
    if x.is_cuda:
        from .gather_rows_triton import gather

        return gather(x, tokens)
    return x.index_select(0, tokens)


def _add(rows, places):
    if rows.is_cuda:
        from .gather_rows_triton import sum_rows
        from .row_sums import RowSums

        num_tokens, k = places.shape
        offsets = torch.arange(0, num_tokens * k + 1, k, device=rows.device)
        return sum_rows(rows.contiguous(), RowSums(num_tokens, ((offsets, places.flatten()),)), rows.dtype)
    dtype = torch.promote_types(rows.dtype, torch.float32)
    total = rows.index_select(0, places[:, 0]).to(dtype)
    for choice in range(1, places.shape[1]):
        total += rows.index_select(0, places[:, choice])
    return total.to(rows.dtype)


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, places):
        ctx.save_for_backward(places)
        return _spread(x, order, places)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _add(grad, *ctx.saved_tensors), None, None


class _AddChoices(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order, places):
        ctx.save_for_backward(order, places)
        return _add(rows, places)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return _spread(grad, *ctx.saved_tensors), None, None


class _WeightedSwiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up, weights):
        ctx.save_for_backward(gate_up, weights)
        if gate_up.is_cuda:
            from .expert_rows_triton import forward

            return forward(gate_up.contiguous(), weights.contiguous())
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        return (weights[:, None] * torch.nn.functional.silu(gate) * up).to(gate_up.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        gate_up, weights = ctx.saved_tensors
        if gate_up.is_cuda:
            from .expert_rows_triton import backward

            return backward(gate_up.contiguous(), weights.contiguous(), grad.contiguous())
        gate, up = gate_up.to(weights.dtype).chunk(2, dim=-1)
        grad = grad.to(weights.dtype)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_weights = (grad * silu * up).sum(-1)
        grad = grad * weights[:, None]
        grad_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat([grad_gate, grad * silu], dim=-1).to(gate_up.dtype), grad_weights
