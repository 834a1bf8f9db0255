"""What happens to one tile of logits in `log_probs.py`, in plain torch: the CPU path, and the twin of the kernels."""

from typing import NamedTuple

import torch


class Transform(NamedTuple):
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


class SoftmaxSums(NamedTuple):
    """Running sums over the vocabulary of R rows, `[R]`, fp32 or fp64.

    Attributes:
        largest: largest logit so far.
        total: sum of exp(logit - largest).
        weighted: sum of logit * exp(logit - largest).
        target_logit: the target's logit; NaN until its tile was folded.
    """

    largest: torch.Tensor
    total: torch.Tensor
    weighted: torch.Tensor
    target_logit: torch.Tensor

    @classmethod
    def start(cls, num_rows: int, dtype: torch.dtype, device: torch.device) -> "SoftmaxSums":
        """Before the first tile."""
        values = (float("-inf"), 0.0, 0.0, float("nan"))
        return cls(*(torch.full((num_rows,), value, dtype=dtype, device=device) for value in values))

    def of(self, rows: slice) -> "SoftmaxSums":
        """Views of some rows."""
        return SoftmaxSums(*(x[rows] for x in self))


def fold_tile(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    columns: torch.Tensor,
    transform: Transform,
    sums: SoftmaxSums,
    with_entropy: bool,
) -> None:
    """Add one tile to the running sums, in place.

    Args:
        logits: `[R, E]`, the projection's output; overwritten.
        bias: `[E]`, in `logits`'s dtype, to which the sum is rounded.
        columns: `[R]`, int64, the target's column in the tile; out of 0 .. E - 1 where the target is elsewhere.
        transform: applied to the logits.
        sums: of these rows.
        with_entropy: whether `weighted` is kept.
    """
    logits = _transformed(logits, bias, transform, sums.total.dtype)
    column, inside = _clamped(columns, logits.shape[1])
    here = logits.gather(1, column)[:, 0]
    sums.target_logit.copy_(torch.where(inside, here, sums.target_logit))

    largest = torch.maximum(sums.largest, logits.amax(-1))
    shrink = (sums.largest - largest).exp_()
    exp = (logits - largest[:, None]).exp_()
    sums.total.mul_(shrink).add_(exp.sum(-1))
    if with_entropy:
        sums.weighted.mul_(shrink).add_(exp.mul_(logits).sum(-1))
    sums.largest.copy_(largest)


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
    """Gradient of one tile of the projection's output.

    Args:
        logits, bias, columns, transform: as in `fold_tile`; `logits` is overwritten.
        log_z: `[R]`, logarithm of the softmax's denominator.
        entropies: `[R]`; None without a gradient of the entropies.
        grad_log_probs: `[R]`, contiguous, or None for zero.
        grad_entropies: `[R]`, contiguous, or None for zero.

    Returns:
        `[R, E]` in `logits`'s dtype.
    """
    dtype = logits.dtype
    logits = _transformed(logits, bias, transform, log_z.dtype)
    log_p = logits - log_z[:, None]
    p = log_p.exp()
    grad = torch.zeros_like(p)
    if grad_entropies is not None:  # d entropy / d logit_j = -p_j (log p_j + entropy)
        grad -= log_p.add_(entropies[:, None]).mul_(p).mul_(grad_entropies[:, None])
    if grad_log_probs is not None:  # d log p_t / d logit_j = [j = t] - p_j
        column, inside = _clamped(columns, logits.shape[1])
        grad -= p.mul_(grad_log_probs[:, None])
        grad.scatter_add_(1, column, torch.where(inside, grad_log_probs, 0)[:, None])
    return transform.apply_derivative(grad, logits).to(dtype)


def _transformed(
    logits: torch.Tensor, bias: torch.Tensor | None, transform: Transform, dtype: torch.dtype
) -> torch.Tensor:
    if bias is not None:
        logits += bias
    return transform.apply(logits.to(dtype))


def _clamped(columns: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns `[R, 1]` that can be read, and which of them are the targets' `[R]`."""
    return columns.clamp(0, width - 1)[:, None], (columns >= 0) & (columns < width)
