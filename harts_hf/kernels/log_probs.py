"""Log-probabilities and entropies of a language-model head, without the logits of all rows in memory.

The logits exist one tile (rows x vocabulary) at a time: the forward folds each tile into running sums, the backward
computes it again. That is one matrix product more than keeping all logits, and saves P * vocab elements of memory, and
as many again for their gradient. A gradient in the forward instead would save the product only if each row's weight in
the loss were known there.

On Hopper `log_probs_gemm_triton.py` does what happens to a tile within the product that computes it, and its forward
keeps no tile. Elsewhere on CUDA that is one pass over the tile between products of cuBLAS, `log_probs_triton.py`, and
on the CPU `log_probs_torch.py`. The vocabulary is the outer loop, so that the weight's gradient is finished tile by
tile and never stands in memory in fp32.
"""

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple, get_args

import torch
from torch.autograd.function import once_differentiable

from .log_probs_torch import SoftmaxSums, Transform

Implementation = Literal["triton", "triton_gemm", "torch"]
_MOST_ROWS = {"triton": 32768, "triton_gemm": 32768, "torch": 2048}  # of a tile by default
_TILE_ELEMENTS = {"triton": 2**27, "triton_gemm": 11 * 2**24, "torch": 2**25}
_FOLDED_TILES = 16  # that "triton_gemm" reduces at a time in the forward, which keeps 8 or 12 bytes of 256 logits


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
    tile: tuple[int, int] | None = None,
    implementation: Implementation | None = None,
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
        tile: rows and vocabulary entries of the logits that exist at a time. By default all rows up to 32,768 and as
            many entries as make 352 MiB in bf16, 256 MiB for "triton"; for "torch" up to 2,048 rows and 128 MiB in
            fp32, where the work on it takes some four times as much. More rows mean fewer passes over a part of the
            weight's gradient, more entries mean fewer passes over the hidden states' gradient.
        implementation: "triton_gemm", products with fused epilogues: the default on compute capability 9.0 (Hopper)
            for a projection in bf16 or fp16, D a multiple of 8 and operands whose memory starts at a multiple of 16
            bytes; "triton", the default on CUDA elsewhere but for fp64; or "torch".

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
    if tile is not None and (len(tile) != 2 or min(tile) < 1):
        raise ValueError(f"tile must be two positive sizes (rows, vocabulary entries), got {tile}")
    dtype = _projection_dtype(hidden)
    if implementation is None and hidden.is_cuda and hidden.dtype != torch.float64:
        implementation = "triton_gemm" if _fits_gemm(hidden, weight, dtype) else "triton"
    implementation = implementation or "torch"
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}")
    if implementation != "torch" and hidden.dtype == torch.float64:
        raise ValueError(f"implementation {implementation!r} computes in fp32: use 'torch' for float64")
    if implementation != "torch" and not hidden.is_cuda:
        raise ValueError(f"implementation {implementation!r} needs CUDA tensors, got {hidden.device}: use 'torch'")
    if implementation == "triton_gemm" and not _fits_gemm(hidden, weight, dtype):
        raise ValueError(
            "implementation 'triton_gemm' needs compute capability 9.0, a projection in bfloat16 or float16, a hidden "
            "size that is a multiple of 8 and operands at multiples of 16 bytes, got "
            f"{dtype} {tuple(hidden.shape)} at {hidden.data_ptr():#x} and {weight.data_ptr():#x}: use 'triton'"
        )
    devices = {x.device for x in (hidden, weight, targets, bias) if x is not None}
    if len(devices) > 1:
        raise ValueError(f"hidden, weight, targets and bias must be on one device, got {sorted(map(str, devices))}")

    transform = Transform(logit_scale, softcap, temperature)
    tile = tile or _default_tile(len(hidden), implementation)
    return LogProbs(
        *_LinearLogProbs.apply(hidden, weight, bias, targets, transform, with_entropy, tile, implementation, dtype)
    )


def _projection_dtype(hidden: torch.Tensor) -> torch.dtype:
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def _fits_gemm(hidden: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether `log_probs_gemm_triton.py` computes this projection in `dtype`; operands in others are copied."""
    return (
        torch.cuda.get_device_capability(hidden.device) == (9, 0)
        and dtype in (torch.bfloat16, torch.float16)
        and hidden.shape[1] % 8 == 0
        and all(x.dtype != dtype or x.data_ptr() % 16 == 0 for x in (hidden, weight))
    )


def _default_tile(num_rows: int, implementation: Implementation) -> tuple[int, int]:
    rows = max(1, min(num_rows, _MOST_ROWS[implementation]))
    return rows, _TILE_ELEMENTS[implementation] // rows // 256 * 256


def _fold_function(implementation: Implementation, buffer: torch.Tensor | None):
    """Folds a tile of `hidden @ weight.t()` into sums: arguments of `fold_tile`, but both operands for the logits."""
    if implementation == "triton_gemm":
        from .log_probs_gemm_triton import fold_product

        return fold_product
    if implementation == "triton":
        from .log_probs_triton import fold_tile
    else:
        from .log_probs_torch import fold_tile
    return lambda hidden, weight, *rest: fold_tile(_project(hidden, weight, buffer), *rest)


def _gradient_function(implementation: Implementation, buffer: torch.Tensor):
    """Gradient of a tile of `hidden @ weight.t()`, in `buffer`: arguments as above, of `tile_gradient`."""
    if implementation == "triton_gemm":
        from .log_probs_gemm_triton import product_gradient

        return functools.partial(product_gradient, buffer=buffer)
    if implementation == "triton":
        from .log_probs_triton import tile_gradient
    else:
        from .log_probs_torch import tile_gradient
    return lambda hidden, weight, *rest: tile_gradient(_project(hidden, weight, buffer), *rest)


class _LinearLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, transform, with_entropy, tile, implementation, dtype):
        ctx.set_materialize_grads(False)  # entropies are often only logged: no work for their zero gradient
        ctx.transform, ctx.tile, ctx.implementation, ctx.dtype = transform, tile, implementation, dtype
        sums = SoftmaxSums.start(len(hidden), torch.promote_types(ctx.dtype, torch.float32), hidden.device)
        is_gemm = implementation == "triton_gemm"
        fold = _fold_function(implementation, None if is_gemm else _tile_buffer(hidden, weight, tile, dtype))
        for entries in _tiles(len(weight), tile[1] * (_FOLDED_TILES if is_gemm else 1)):
            weight_tile, bias_tile = _cast(weight, bias, entries, dtype)
            for rows in _tiles(len(hidden), tile[0]):
                columns = targets[rows] - entries.start
                fold(hidden[rows].to(dtype), weight_tile, bias_tile, columns, transform, sums.of(rows), with_entropy)

        log_z = sums.largest + sums.total.log()
        entropies = log_z - sums.weighted / sums.total if with_entropy else None
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropies)
        return sums.target_logit - log_z, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_log_probs, grad_entropies):
        hidden, weight, bias, targets, log_z, entropies = ctx.saved_tensors
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        contiguous = (None if x is None else x.contiguous() for x in (grad_log_probs, grad_entropies))
        grad_log_probs, grad_entropies = contiguous  # either may be an expanded number
        grad_hidden = torch.zeros_like(hidden, dtype=log_z.dtype) if need_hidden else None
        grad_weight = torch.zeros_like(weight) if need_weight else None
        grad_bias = torch.zeros_like(bias) if need_bias else None

        # A tile of all rows gives its part of the weight's gradient in one product, which cuBLAS rounds once.
        one_product = len(hidden) <= ctx.tile[0] and weight.dtype == ctx.dtype
        gradient = _gradient_function(ctx.implementation, _tile_buffer(hidden, weight, ctx.tile, ctx.dtype))
        grad = None
        for entries in _tiles(len(weight), ctx.tile[1]):
            weight_tile, bias_tile = _cast(weight, bias, entries, ctx.dtype)
            grad_weight_tile = None
            if need_weight and not one_product:
                grad_weight_tile = torch.zeros_like(weight_tile, dtype=log_z.dtype)
            grad_bias_tile = torch.zeros_like(bias_tile, dtype=log_z.dtype) if need_bias else None
            for rows in _tiles(len(hidden), ctx.tile[0]):
                hidden_rows = hidden[rows].to(ctx.dtype)
                grad = gradient(
                    hidden_rows,
                    weight_tile,
                    bias_tile,
                    targets[rows] - entries.start,
                    ctx.transform,
                    log_z[rows],
                    None if grad_entropies is None else entropies[rows],
                    None if grad_log_probs is None else grad_log_probs[rows],
                    None if grad_entropies is None else grad_entropies[rows],
                )
                if need_hidden:
                    _add_product(grad_hidden[rows], grad, weight_tile)
                if need_weight and one_product:
                    torch.mm(grad.t(), hidden_rows, out=grad_weight[entries])  # `@` would follow autocast
                elif need_weight:
                    _add_product(grad_weight_tile, grad.t(), hidden_rows)
                if need_bias:
                    grad_bias_tile += grad.sum(0, dtype=log_z.dtype)
            if need_weight and not one_product:
                grad_weight[entries] = grad_weight_tile
            if need_bias:
                grad_bias[entries] = grad_bias_tile
        del gradient, grad  # the tile's memory, before the gradient is rounded
        return grad_hidden.to(hidden.dtype) if need_hidden else None, grad_weight, grad_bias, *(None,) * 6


def _tiles(total: int, size: int) -> Iterator[slice]:
    for begin in range(0, total, size):
        yield slice(begin, min(begin + size, total))


def _tile_buffer(
    hidden: torch.Tensor, weight: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Memory for the largest tile of logits, in rows of a multiple of 8: one for the whole pass."""
    entries = -(-min(tile[1], len(weight)) // 8) * 8
    return hidden.new_empty(min(tile[0], len(hidden)) * entries, dtype=dtype)


def _cast(
    weight: torch.Tensor, bias: torch.Tensor | None, entries: slice, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return weight[entries].to(dtype), None if bias is None else bias[entries].to(dtype)


def _project(hidden: torch.Tensor, weight: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """One tile of the projection, in `buffer`."""
    shape = len(hidden), len(weight)
    return torch.mm(hidden, weight.t(), out=buffer[: shape[0] * shape[1]].view(shape))


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`total += a @ b` without rounding the product to the dtype of `a` and `b` first."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))
