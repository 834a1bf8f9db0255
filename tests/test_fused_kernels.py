"""The kernels of fused modules in Triton against fp64: on a GPU, or on the CPU in Triton's interpreter.

TRITON_INTERPRET=1 python -m pytest tests/test_fused_kernels.py
"""

import os

import pytest
import torch

from harts_hf.kernels.kda_gate import kda_gate
from harts_hf.kernels.rms_norm import rms_norm
from harts_hf.kernels.swiglu import swiglu

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if IS_INTERPRETED else [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = 3e-6  # a few roundings of 6e-8 and the GPU's approximate exp, beside the rounding of the result

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not IS_INTERPRETED,
        reason="needs a CUDA device, or TRITON_INTERPRET=1 with Triton",
    ),
]


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def results(function, leaves):
    """The output and the gradient of each leaf, for random gradients of the output."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    output = function(*leaves)
    grad = (randn(*output.shape, seed=9) * 16).round().to(output.dtype)  # small integers: exact in all dtypes
    return [output.detach(), *torch.autograd.grad(output, leaves, grad)]


def relative_error(found, truth):
    return ((found.double() - truth.double()).norm() / (truth.double().norm() + 1e-30)).item()


def check(function, leaves, tolerance=TOLERANCE, **options):
    """Triton against torch in fp64, rounded once; dtypes of gradients; the same bits twice."""

    def run(*leaves, implementation="triton"):
        return function(*leaves, implementation=implementation, **options)

    found, again = results(run, leaves), results(run, leaves)
    truth = results(lambda *x: run(*x, implementation="torch"), [x.double() for x in leaves])
    for a, b, t in zip(found, again, truth, strict=True):
        assert torch.equal(a, b)
        assert relative_error(a, t) < relative_error(t.to(a.dtype), t) + tolerance
    assert [x.dtype for x in found[1:]] == [x.dtype for x in leaves]
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 4), (3, 37, 12), (70, 128), (5, 1536), (3, 5000)], ids=str)
@pytest.mark.parametrize("activation", [None, "sigmoid", "silu"])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rms_norm(zero_centered, activation, shape, dtype):
    x, weight = randn(*shape, seed=0, dtype=dtype), randn(shape[-1], seed=1, dtype=dtype)
    leaves = [x, weight] if activation is None else [x, weight, randn(*shape, seed=2, dtype=dtype)]

    def norm(x, weight, gate=None, **options):
        return rms_norm(x, weight, gate=gate, epsilon=1e-5, **options)

    check(norm, leaves, zero_centered=zero_centered, activation=activation)


@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter is slow")
def test_rms_norm_of_many_rows():
    """Programs of the backward that own several tiles."""
    x, weight, gate = randn(70_001, 128, seed=0), randn(128, seed=1), randn(70_001, 128, seed=2)

    def norm(x, weight, gate, **options):
        return rms_norm(x, weight, gate=gate, activation="sigmoid", epsilon=1e-5, **options)

    check(norm, [x, weight, gate])


def test_rms_norm_of_several_tiles_a_program(monkeypatch):
    from harts_hf.kernels import rms_norm_triton

    monkeypatch.setattr(rms_norm_triton, "PROGRAMS", 2)
    check(
        lambda x, weight, **options: rms_norm(x, weight, epsilon=1e-5, **options),
        [randn(9, 1500, seed=0), randn(1500, seed=1)],
    )


def test_a_row_has_the_same_bits_among_any_others():
    x, weight = randn(90, 128, seed=0), randn(128, seed=1)

    def run(rows):
        grad = torch.ones_like(rows)
        rows = rows.detach().requires_grad_()
        y = rms_norm(rows, weight, epsilon=1e-6, implementation="triton")
        return y.detach(), torch.autograd.grad(y, rows, grad)[0]

    for all_rows, some in zip(run(x), run(x[41:48]), strict=True):
        assert torch.equal(all_rows[41:48], some)


def test_rows_that_stand_apart():
    """A slice of channels is read in place, a slice of every other channel and a spread gradient are copied."""
    wide, weight = randn(9, 3, 40, seed=0), randn(16, seed=1)
    for x in (wide[..., 8:24], wide[..., ::2][..., :16]):
        found = []
        for rows in (x, x.contiguous()):
            leaf = rows.detach().requires_grad_()
            y = rms_norm(leaf, weight, epsilon=1e-6, implementation="triton")
            found.append((y.detach(), torch.autograd.grad(y.sum(), leaf)[0]))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_wider_weight_and_narrower_result():
    x, weight = randn(9, 16, seed=0, dtype=torch.float16), randn(16, seed=1)
    y = rms_norm(x, weight, epsilon=1e-6, dtype=torch.float32, implementation="triton")
    truth = rms_norm(x.double(), weight.double(), epsilon=1e-6, implementation="torch")
    assert y.dtype == torch.float32 and relative_error(y, truth) < TOLERANCE


def test_a_frozen_weight_gets_no_gradient():
    x, weight = randn(9, 16, seed=0).requires_grad_(), randn(16, seed=1)
    rms_norm(x, weight, epsilon=1e-6, implementation="triton").sum().backward()
    assert x.grad is not None and weight.grad is None


def test_no_rows():
    x, weight = torch.empty(0, 16, device=DEVICE).requires_grad_(), randn(16, seed=1).requires_grad_()
    rms_norm(x, weight, epsilon=1e-6, implementation="triton").sum().backward()
    assert x.grad.shape == (0, 16) and not weight.grad.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 5), (3, 37, 120)], ids=str)
def test_swiglu(shape, dtype):
    check(swiglu, [randn(*shape, seed=0, dtype=dtype), randn(*shape, seed=1, dtype=dtype)])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1, 4), (1, 37, 3, 12), (2, 70, 5, 128)], ids=str)
@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("shift", [0.0, -12.0])  # -12: decays of exp(-6e-6), whose softplus must keep its digits
def test_kda_gate(shift, lower_bound, shape, dtype):
    heads, dim = shape[-2:]
    x = randn(*shape, seed=0, dtype=dtype)
    A_log, dt_bias = randn(1, 1, heads, 1, seed=1) * 0.5, randn(heads * dim, seed=2) + shift
    # dt_bias and A_log are fp32 as in the models; the sum of A_log's gradient cancels
    check(
        lambda *x, implementation: kda_gate(
            *x, lower_bound=lower_bound, dtype=x[0].dtype, implementation=implementation
        ),
        [x, A_log, dt_bias],
        1e-5,
    )


def test_kda_gate_of_several_tiles_a_program(monkeypatch):
    from harts_hf.kernels import kda_gate_triton

    monkeypatch.setattr(kda_gate_triton, "ROW_GROUPS", 2)
    check(
        lambda *x, implementation: kda_gate(*x, lower_bound=-5.0, dtype=x[0].dtype, implementation=implementation),
        [randn(1, 50, 5, 128, seed=0), randn(5, seed=1), randn(640, seed=2)],
        1e-5,
    )


def test_fp64_is_refused():
    x, weight = torch.ones(2, 4, dtype=torch.float64, device=DEVICE), torch.ones(4, device=DEVICE)
    for run in (
        lambda: rms_norm(x, weight, epsilon=1e-6, implementation="triton"),
        lambda: swiglu(x, x, implementation="triton"),
        lambda: kda_gate(x, weight, weight, lower_bound=None, dtype=x.dtype, implementation="triton"),
    ):
        with pytest.raises(ValueError, match="fp64"):
            run()
