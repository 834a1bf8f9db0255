"""The head's products with fused epilogues against fp64: on a GPU of capability 9.0, or in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/test_log_probs_gemm.py

Operands are small multiples of powers of two: their products are exact in fp32, whatever the order of the sum, so that
both sides round the same logits to the operands' dtype.
"""

import os

import pytest
import torch

from harts_hf.kernels import log_probs_torch
from harts_hf.kernels.log_probs import linear_log_probs
from harts_hf.kernels.log_probs_torch import SoftmaxSums, Transform

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float16] if IS_INTERPRETED else [torch.bfloat16, torch.float16]
TRANSFORMS = [
    Transform(1.0, None, 1.0),
    Transform(1.0, None, 0.7),
    Transform(-0.25, None, 1.3),
    Transform(1.0, 2.0, 1.0),
    Transform(2.0, 1.5, 0.6),
]
TOLERANCE = 1e-6  # a few roundings of 6e-8 and the GPU's approximate exp, beside the rounding of a gradient

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not IS_HOPPER and not IS_INTERPRETED,
        reason="needs a device of compute capability 9.0, or TRITON_INTERPRET=1 with Triton",
    ),
]


def schedules():
    from harts_hf.kernels.log_probs_gemm_triton import Schedule

    return {
        "default": Schedule(),
        "small": Schedule(rows=64, columns=64, depth=32, group=3, slices=1, warps=4),
        "grid": Schedule(rows=64, group=1, programs_per_processor=0),
    }


def make_case(shape, has_bias, dtype):
    """hidden, weight, bias, columns of targets (some elsewhere) and upstream gradients."""
    num_rows, dim, width = shape
    generator = torch.Generator().manual_seed(0)

    def integers(*shape):
        return torch.randint(-4, 5, shape, generator=generator)

    hidden = integers(num_rows, dim).to(DEVICE, dtype)
    weight = (integers(width, dim) / 32).to(DEVICE, dtype)
    bias = (integers(width) / 4).to(DEVICE, dtype) if has_bias else None
    columns = torch.randint(-width // 4 - 1, width + width // 4 + 1, (num_rows,), generator=generator).to(DEVICE)
    grads = torch.randn(2, num_rows, generator=generator).to(DEVICE)
    return hidden, weight, bias, columns, grads


def logits_of(hidden, weight):
    return (hidden.double() @ weight.double().t()).to(hidden.dtype)


def folded_by_twin(hidden, weight, bias, columns, transform, with_entropy=True):
    sums = SoftmaxSums.start(len(hidden), torch.float64, hidden.device)
    log_probs_torch.fold_tile(logits_of(hidden, weight), bias, columns, transform, sums, with_entropy)
    return sums


def log_z_and_entropies(sums):
    log_z = sums.largest + sums.total.log()
    return log_z, log_z - sums.weighted / sums.total


def relative_error(found, truth):
    return ((found.double() - truth.double()).norm() / (truth.double().norm() + 1e-30)).item()


SHAPES = [(1, 8, 3), (37, 40, 97), (200, 72, 300), (130, 64, 512)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("schedule", ["default", "small", "grid"])
def test_both_products(schedule, transform, has_bias, shape, dtype):
    """The sums after two tiles, and the gradient of one, which other memory surrounds."""
    from harts_hf.kernels.log_probs_gemm_triton import fold_product, product_gradient

    schedule = schedules()[schedule]
    hidden, weight, bias, columns, (grad_log_probs, grad_entropies) = make_case(shape, has_bias, dtype)
    truth = folded_by_twin(hidden, weight, bias, columns, transform)
    half = len(weight) // 2
    for with_entropy in (True, False):
        sums = SoftmaxSums.start(len(hidden), torch.float32, hidden.device)
        for part in (slice(half), slice(half, None)):
            if len(weight[part]):
                bias_part = None if bias is None else bias[part]
                columns_part = columns - (part.start or 0)
                fold_product(hidden, weight[part], bias_part, columns_part, transform, sums, with_entropy, schedule)
        assert torch.equal(sums.target_logit.isnan(), (columns < 0) | (columns >= len(weight)))
        pairs = list(zip(sums, truth, strict=True))
        pairs[3] = [x.nan_to_num() for x in pairs[3]]
        for found, expected in pairs if with_entropy else (*pairs[:2], pairs[3]):
            assert relative_error(found, expected) < TOLERANCE

    log_z, entropies = log_z_and_entropies(truth)
    for of_log_probs, of_entropies in ((True, False), (False, True), (True, True)):
        rows = (
            entropies if of_entropies else None,
            grad_log_probs if of_log_probs else None,
            grad_entropies if of_entropies else None,
        )
        buffer = hidden.new_full((len(hidden) * (len(weight) + 8) + 50,), 7.0)
        per_row = [None if x is None else x.float() for x in rows]
        grad = product_gradient(
            hidden, weight, bias, columns, transform, log_z.float(), *per_row, buffer, schedule=schedule
        )
        per_row = [None if x is None else x.double() for x in rows]
        # The twin would round its result to fp16: it gets the rounded logits, bias included, in fp64.
        logits = logits_of(hidden, weight) if bias is None else logits_of(hidden, weight) + bias
        expected = log_probs_torch.tile_gradient(logits.double(), None, columns, transform, log_z, *per_row)
        rounding = relative_error(expected.to(dtype), expected)
        assert relative_error(grad, expected) < 1.01 * rounding + TOLERANCE
        assert buffer.data_ptr() == grad.data_ptr() and (buffer[len(hidden) * grad.stride(0) :] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_same_bits_twice_and_wrong_targets_are_caught(dtype):
    """Negative control: shifted targets give other targets' logits and another gradient."""
    from harts_hf.kernels.log_probs_gemm_triton import fold_product, product_gradient

    hidden, weight, _, columns, (grad_log_probs, _) = make_case((300, 64, 700), False, dtype)
    found = []
    for targets in (columns, columns, columns.roll(1)):
        sums = SoftmaxSums.start(len(hidden), torch.float32, hidden.device)
        fold_product(hidden, weight, None, targets, TRANSFORMS[0], sums, True)
        log_z, _ = log_z_and_entropies(sums)
        buffer = hidden.new_empty(300 * 704)
        grad = product_gradient(
            hidden, weight, None, targets, TRANSFORMS[0], log_z, None, grad_log_probs, None, buffer
        )
        found.append([*sums[:3], sums.target_logit.nan_to_num(), grad])
    assert all(torch.equal(a, b) for a, b in zip(*found[:2], strict=True))
    assert relative_error(found[2][3], found[0][3]) > 0.1
    assert relative_error(found[2][4], found[0][4]) > 0.1


@pytest.mark.skipif(IS_INTERPRETED, reason="the operator takes CUDA tensors")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_operator_has_the_precision_of_its_twin(autocast, has_bias, dtype):
    """Odd sizes, several tiles of rows and of the vocabulary, fp32 operands under autocast."""
    generator = torch.Generator().manual_seed(0)
    operand_dtype = torch.float32 if autocast else dtype
    shapes = ((300, 136), (1001, 136), (1001,))
    leaves = [torch.randn(*shape, generator=generator).div(shape[-1] ** 0.25) for shape in shapes]
    leaves = [x.to(DEVICE, operand_dtype) for x in leaves]
    targets = torch.randint(0, 1001, (300,), generator=generator).to(DEVICE)
    weights = torch.randn(2, 300, generator=generator).to(DEVICE)

    def results(leaves, implementation):
        leaves = [x.clone().requires_grad_() for x in leaves]
        hidden, weight, bias = leaves
        with torch.autocast("cuda", dtype=dtype, enabled=autocast and implementation == "triton_gemm"):
            outputs = linear_log_probs(
                hidden, weight, targets, bias=bias if has_bias else None, temperature=0.7, tile=(128, 304),
                implementation=implementation,
            )  # fmt: skip
        loss = sum((x * w).sum() for x, w in zip(outputs, weights, strict=True))
        grads = torch.autograd.grad(loss, leaves[: 3 if has_bias else 2])
        return [x.detach() for x in (*outputs, *grads)]

    found = results(leaves, "triton_gemm")
    truth = results([x.to(dtype).double() for x in leaves], "torch")
    twin = results([x.to(dtype) for x in leaves], "torch")
    for a, b, t in zip(found, twin, truth, strict=True):
        assert relative_error(a, t) < 2 * relative_error(b, t) + TOLERANCE
