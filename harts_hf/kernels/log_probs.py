"""Log-probabilities and entropies of a language-model head, without the logits of all rows in memory.

The logits exist one tile (rows x vocabulary) at a time: the forward folds each tile into running sums, the backward
computes it again. That is one matrix product more than keeping all logits, and saves P * vocab elements of memory, and
as many again for their gradient.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable


class LogProbs(NamedTuple):
    """Of P targets.

    Attributes:
        log_probs (`[P]`, fp32): log-probability of each target.
        entropies (`[P]`, fp32): entropy of each distribution, in nats; None if not asked for.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor | None


def linear_log_probs(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = True,
    tile: tuple[int, int] = (2048, 16384),
) -> LogProbs:
    """Log-probabilities of `targets` and entropies under `softmax(logits / temperature)`.

    Equals, for P hidden states,

        logits = logit_scale * (hidden @ weight.T + bias)
        logits = softcap * tanh(logits / softcap)                  # if softcap is given
        log_p = log_softmax(logits / temperature, -1)
        log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    with the conventions of TRL's fused head: the projection runs in the autocast dtype, or else in `hidden`'s, and all
    that follows in fp32; the gradient of the logits is rounded to the projection's dtype, and gradients of `hidden`,
    `weight` and `bias` are summed in fp32. For fp64 `hidden` everything is fp64.

    Args:
        hidden: `[P, D]`, floating point; P may be 0.
        weight: `[vocab, D]`.
        targets: `[P]`, int64, in `0 .. vocab - 1`. A target out of range gives NaN: a check would wait for the device.
        bias: `[vocab]`.
        temperature: > 0.
        logit_scale: factor of the logits.
        softcap: > 0, bound of the scaled logits.
        with_entropy: whether entropies are computed.
        tile: rows and vocabulary entries of the logits that exist at a time. The default takes 128 MiB in fp32, and
            the work on it some four times as much. More rows mean fewer passes over the weight's gradient.

    Returns:
        [`LogProbs`], fp32 (fp64 for fp64 `hidden`). Both are differentiable in hidden, weight and bias, once.

    Raises:
        ValueError: shapes or devices do not agree, or a parameter is out of range.
    """
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [P, D] and weight [vocab, D], got {tuple(hidden.shape)}, {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(f"targets must be int64 [{len(hidden)}], got {targets.dtype} {tuple(targets.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"bias must have shape {tuple(weight.shape[:1])}, got {tuple(bias.shape)}")
    if not temperature > 0 or not (softcap is None or softcap > 0):
        raise ValueError(f"temperature and softcap must be above 0, got {temperature} and {softcap}")
    if len(tile) != 2 or min(tile) < 1:
        raise ValueError(f"tile must be two positive sizes (rows, vocabulary entries), got {tile}")
    devices = {x.device for x in (hidden, weight, targets, bias) if x is not None}
    if len(devices) > 1:
        raise ValueError(f"hidden, weight, targets and bias must be on one device, got {sorted(map(str, devices))}")

    transform = _Transform(logit_scale, softcap, temperature)
    return LogProbs(*_LinearLogProbs.apply(hidden, weight, bias, targets, transform, with_entropy, tile))


class _Transform(NamedTuple):
    """What happens to the projection's output before the softmax."""

    logit_scale: float
    softcap: float | None
    temperature: float

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """In place."""
        logits *= self.logit_scale
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.mul_(1 / self.temperature)

    def apply_derivative(self, grad: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """Gradient of the transformed logits -> gradient of the projection's output, in place."""
        if self.softcap is not None:
            tanh = transformed * (self.temperature / self.softcap)
            grad *= 1 - tanh.square_()
        return grad.mul_(self.logit_scale / self.temperature)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, with_entropy, tile):
        ctx.set_materialize_grads(False)  # entropies are often only logged: no work for their zero gradient
        device = hidden.device.type
        ctx.dtype = hidden.dtype
        if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
            ctx.dtype = torch.get_autocast_dtype(device)
        ctx.transform, ctx.tile = transform, tile

        sum_dtype = torch.promote_types(ctx.dtype, torch.float32)
        log_z = hidden.new_empty(len(hidden), dtype=sum_dtype)
        mean_logit = torch.empty_like(log_z) if with_entropy else None  # under the softmax
        target_logit = torch.full_like(log_z, float("nan"))
        for rows in _tiles(len(hidden), tile[0]):
            hidden_rows = hidden[rows].to(ctx.dtype)
            largest = torch.full_like(log_z[rows], float("-inf"))
            total, weighted = torch.zeros_like(largest), torch.zeros_like(largest)
            for entries in _tiles(len(weight), tile[1]):
                logits = transform.apply(_project(hidden_rows, weight, bias, entries, sum_dtype))
                column, inside = _target_columns(targets[rows], entries)
                here = logits.gather(1, column)[:, 0]
                target_logit[rows] = torch.where(inside, here, target_logit[rows])

                new_largest = torch.maximum(largest, logits.amax(-1))
                shrink = (largest - new_largest).exp_()
                exp = (logits - new_largest[:, None]).exp_()
                total = total * shrink + exp.sum(-1)
                if with_entropy:
                    weighted = weighted * shrink + exp.mul_(logits).sum(-1)
                largest = new_largest
            log_z[rows] = largest + total.log()
            if with_entropy:
                mean_logit[rows] = weighted / total

        entropies = log_z - mean_logit if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies)
        return target_logit - log_z, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        hidden, weight, bias, targets, log_z, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=log_z.dtype) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=log_z.dtype) if need_bias else None

        for rows in _tiles(len(hidden), ctx.tile[0]):
            hidden_rows = hidden[rows].to(ctx.dtype)
            for entries in _tiles(len(weight), ctx.tile[1]):
                logits = ctx.transform.apply(_project(hidden_rows, weight, bias, entries, log_z.dtype))
                log_p = logits - log_z[rows, None]
                p = log_p.exp()
                grad = torch.zeros_like(p)
                if grad_entropies is not None:  # d entropy / d logit_j = -p_j (log p_j + entropy)
                    grad -= log_p.add_(entropies[rows, None]).mul_(p).mul_(grad_entropies[rows, None])
                if grad_log_probs is not None:  # d log p_t / d logit_j = [j = t] - p_j
                    column, inside = _target_columns(targets[rows], entries)
                    grad -= p.mul_(grad_log_probs[rows, None])
                    grad.scatter_add_(1, column, torch.where(inside, grad_log_probs[rows], 0)[:, None])
                grad = ctx.transform.apply_derivative(grad, logits).to(ctx.dtype)
                if need_hidden:
                    _add_product(grad_hidden[rows], grad, weight[entries].to(ctx.dtype))
                if need_weight:
                    _add_product(grad_weight[entries], grad.t(), hidden_rows)
                if need_bias:
                    grad_bias[entries] += grad.sum(0, dtype=log_z.dtype)

        return (
            grad_hidden.to(hidden.dtype) if need_hidden else None,
            grad_weight.to(weight.dtype) if need_weight else None,
            grad_bias.to(bias.dtype) if need_bias else None,
            *(None,) * 4,
        )


def _tiles(total: int, size: int) -> Iterator[slice]:
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


def _project(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, entries: slice, sum_dtype: torch.dtype
) -> torch.Tensor:
    """One tile of the projection: rounded to `hidden`'s dtype, then a new tensor in `sum_dtype`."""
    logits = hidden @ weight[entries].to(hidden.dtype).t()
    if bias is not None:
        logits += bias[entries].to(hidden.dtype)
    return logits.to(sum_dtype)


def _target_columns(targets: torch.Tensor, entries: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Column of each target in a tile `[rows, 1]`, clamped, and whether it lies inside `[rows]`."""
    column = targets - entries.start
    inside = (column >= 0) & (targets < entries.stop)
    return column.clamp(0, entries.stop - entries.start - 1)[:, None], inside


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` without rounding the product to the dtype of `a` and `b` first."""
    if a.is_cuda and a.dtype != total.dtype:
        total += torch.mm(a, b, out_dtype=total.dtype)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
