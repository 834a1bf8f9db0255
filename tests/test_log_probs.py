"""Tiled log-probs and entropies equal a dense log_softmax in fp64, gradients included, and follow TRL's fused head."""

import pytest
import torch
from trl.kernels import ChunkedLogProbFunction

from harts_hf.kernels.log_probs import _default_tile, linear_log_probs

NAMES = ("log_probs", "entropies", "hidden", "weight", "bias")
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"logit_scale": 0.25, "temperature": 1.3},
    {"softcap": 2.0},
    {"softcap": 1.5, "logit_scale": 2.0, "temperature": 0.6},
]
FP64_TOLERANCE = 1e-13


def make_inputs(num_targets=23, dim=24, vocab=97, has_bias=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_targets, dim, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, dim, generator=generator, dtype=torch.float64) / dim**0.5
    bias = torch.randn(vocab, generator=generator, dtype=torch.float64) if has_bias else None
    targets = torch.randint(0, vocab, (num_targets,), generator=generator)
    return [None if x is None else x.to(dtype) for x in (hidden, weight, bias)], targets


def dense(hidden, weight, bias, targets, temperature=1.0, logit_scale=1.0, softcap=None):
    logits = hidden @ weight.t()
    if bias is not None:
        logits = logits + bias
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = torch.log_softmax(logits / temperature, dim=-1)
    return log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def tiled(hidden, weight, bias, targets, **options):
    return linear_log_probs(hidden, weight, targets, bias=bias, **options)


def of_trl(hidden, weight, bias, targets, temperature=1.0, logit_scale=1.0, softcap=None):
    return ChunkedLogProbFunction.apply(
        hidden, weight, bias, targets, temperature, 40, softcap, logit_scale, ("entropy",)
    )[:2]


def results(function, inputs, targets, use=("log_probs", "entropies"), **options):
    """Outputs, and gradients of a loss that weighs each log-prob and each entropy differently."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = dict(zip(NAMES, function(*inputs, targets, **options), strict=False))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(len(targets), generator=generator, dtype=torch.float64) for name in outputs}
    sum((outputs[name] * weights[name].to(outputs[name])).sum() for name in use).backward()
    values = {name: value.detach() for name, value in outputs.items() if value is not None}
    return values | {n: x.grad for n, x in zip(NAMES[2:], inputs, strict=True) if x is not None}


def relative_error(actual, expected):
    return ((actual.double().cpu() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("tile", [(2048, 16384), (23, 97), (7, 40), (1, 1), (5, 96)])
def test_equals_dense_log_softmax(options, tile):
    inputs, targets = make_inputs()
    expected = results(dense, inputs, targets, **options)
    actual = results(tiled, inputs, targets, tile=tile, **options)
    for name, value in expected.items():
        assert relative_error(actual[name], value) < FP64_TOLERANCE, name


@pytest.mark.parametrize("use", [("log_probs",), ("entropies",)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_either_output_alone(use, has_bias):
    inputs, targets = make_inputs(has_bias=has_bias)
    expected = results(dense, inputs, targets, use, **OPTIONS[-1])
    actual = results(tiled, inputs, targets, use, tile=(8, 50), **OPTIONS[-1])
    for name, value in expected.items():
        assert relative_error(actual[name], value) < FP64_TOLERANCE, name


def test_without_entropies():
    inputs, targets = make_inputs()
    expected = results(dense, inputs, targets, ("log_probs",))
    actual = results(tiled, inputs, targets, ("log_probs",), tile=(8, 50), with_entropy=False)
    assert "entropies" not in actual
    for name, value in actual.items():
        assert relative_error(value, expected[name]) < FP64_TOLERANCE, name


def test_only_what_needs_a_gradient_gets_one():
    (hidden, weight, bias), targets = make_inputs()
    weight.requires_grad_()
    linear_log_probs(hidden, weight, targets, bias=bias).log_probs.sum().backward()
    assert hidden.grad is None and bias.grad is None and weight.grad is not None


def test_finite_differences():
    inputs, targets = make_inputs(num_targets=3, dim=4, vocab=7)
    inputs = [x.requires_grad_() for x in inputs]
    options = {"tile": (2, 3), **OPTIONS[-1]}
    assert torch.autograd.gradcheck(lambda *x: tuple(tiled(*x, targets, **options)), inputs)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_trl(options, dtype):
    """Error against fp64 at most twice that of TRL's fused head with the same tiles, plus one rounding."""
    inputs, targets = make_inputs(dtype=dtype)
    expected = results(dense, [x.double() for x in inputs], targets, **options)
    baseline = results(of_trl, inputs, targets, **options)
    actual = results(tiled, inputs, targets, tile=(4096, 40), **options)
    assert actual["log_probs"].dtype == actual["entropies"].dtype == torch.float32
    for name, value in expected.items():
        assert actual[name].dtype == baseline[name].dtype
        bound = 2 * relative_error(baseline[name], value) + torch.finfo(torch.float32).eps
        assert relative_error(actual[name], value) <= bound, name


def test_weight_gradients_are_summed_in_fp32():
    """Thousands of rows, one tile each: a sum rounded to bf16 after each tile would be far off."""
    rows = 2000
    (hidden, weight, _), _ = make_inputs(num_targets=rows, dim=4, vocab=5, dtype=torch.bfloat16)
    hidden = hidden.abs()
    targets = torch.zeros(rows, dtype=torch.int64)
    expected = results(dense, [hidden.double(), weight.double(), None], targets, ("log_probs",))["weight"]
    actual = results(tiled, [hidden, weight, None], targets, ("log_probs",), tile=(1, 5))["weight"]
    assert relative_error(actual, expected) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("head_dtype", [torch.float32, torch.bfloat16])
def test_autocast_sets_the_projection_dtype_as_in_trl(head_dtype):
    inputs, targets = make_inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=head_dtype == torch.bfloat16):
        baseline = of_trl(*inputs, targets)[0]
        actual = tiled(*inputs, targets, tile=(4096, 40)).log_probs
    torch.testing.assert_close(actual, baseline, rtol=0, atol=4e-6)  # fp32 rounding of log-probs of about 5


def test_autocast_around_the_backward_changes_nothing():
    inputs, targets = make_inputs(dtype=torch.float32)
    gradients = []
    for enabled in (False, True):
        leaves = [x.clone().requires_grad_() for x in inputs]
        loss = sum(tiled(*leaves, targets)).sum()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            gradients.append(torch.autograd.grad(loss, leaves))
    for name, expected, actual in zip(NAMES[2:], *gradients, strict=True):
        assert torch.equal(actual, expected), name


def test_large_logits_stay_finite():
    inputs, targets = make_inputs(dtype=torch.float32)
    inputs[0] *= 1e4
    actual = results(tiled, inputs, targets, tile=(8, 10))
    assert all(torch.isfinite(value).all() for value in actual.values())


def test_no_targets():
    inputs, targets = make_inputs(num_targets=0, dtype=torch.float32)
    actual = results(tiled, inputs, targets)
    assert actual["log_probs"].shape == actual["entropies"].shape == (0,)
    assert actual["hidden"].shape == (0, 24)
    assert not actual["weight"].any() and not actual["bias"].any()


def test_a_target_out_of_range_is_nan():
    (hidden, weight, bias), targets = make_inputs()
    targets[3], targets[5] = -100, len(weight)
    log_probs = linear_log_probs(hidden, weight, targets, bias=bias, tile=(8, 50)).log_probs
    assert log_probs.isnan().nonzero()[:, 0].tolist() == [3, 5]


def test_wrong_targets_and_order_of_operations_are_caught():
    """Negative control: shifted targets, and a softcap after the temperature instead of before."""
    inputs, targets = make_inputs()
    options = OPTIONS[-1]
    expected = results(dense, inputs, targets, **options)
    shifted = results(tiled, inputs, targets.roll(1), **options)
    capped_late = results(tiled, inputs, targets, logit_scale=2.0 / 0.6, softcap=1.5)
    for wrong in (shifted, capped_late):
        assert relative_error(wrong["log_probs"], expected["log_probs"]) > 1e-2
        assert relative_error(wrong["weight"], expected["weight"]) > 1e-2


def test_inputs_that_do_not_fit_raise():
    (hidden, weight, bias), targets = make_inputs()
    with pytest.raises(ValueError, match="hidden must be"):
        linear_log_probs(hidden, weight.t(), targets)
    with pytest.raises(ValueError, match="targets must be int64"):
        linear_log_probs(hidden, weight, targets.int())
    with pytest.raises(ValueError, match="bias must have shape"):
        linear_log_probs(hidden, weight, targets, bias=bias[1:])
    with pytest.raises(ValueError, match="must be above 0"):
        linear_log_probs(hidden, weight, targets, temperature=0.0)
    with pytest.raises(ValueError, match="unknown implementation 'cute'"):
        linear_log_probs(hidden, weight, targets, implementation="cute")
    with pytest.raises(ValueError, match="'triton' computes in fp32"):
        linear_log_probs(hidden, weight, targets, implementation="triton")
    with pytest.raises(ValueError, match="'triton' needs CUDA tensors"):
        linear_log_probs(hidden.float(), weight.float(), targets, implementation="triton")
    with pytest.raises(ValueError, match="tile must be"):
        linear_log_probs(hidden, weight, targets, tile=(0, 10))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuda_has_the_precision_of_trl(dtype):
    inputs, targets = make_inputs(num_targets=300, dim=64, vocab=1000, dtype=dtype)
    expected = results(dense, [x.double() for x in inputs], targets, **OPTIONS[-1])
    on_cuda, cuda_targets = [x.cuda() for x in inputs], targets.cuda()

    def with_cuda_weights(function, **options):
        def run(*args, **kwargs):
            return [x.cpu() for x in function(*args, **kwargs)]

        return results(run, on_cuda, cuda_targets, **options)

    baseline = with_cuda_weights(of_trl, **OPTIONS[-1])
    actual = with_cuda_weights(tiled, tile=(128, 300), **OPTIONS[-1])
    for name, value in expected.items():
        bound = 2 * relative_error(baseline[name], value) + torch.finfo(torch.float32).eps
        assert relative_error(actual[name], value) <= bound, name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_triton_has_the_precision_of_its_twin(options, has_bias, dtype):
    inputs, targets = make_inputs(num_targets=150, dim=64, vocab=5000, has_bias=has_bias, dtype=dtype)
    for use in (("log_probs", "entropies"), ("log_probs",), ("entropies",)):
        expected = results(dense, [None if x is None else x.double() for x in inputs], targets, use, **options)
        on_cuda = [None if x is None else x.cuda() for x in inputs]
        found = {}
        for implementation in ("triton", "torch"):

            def run(*args, implementation=implementation, **kwargs):
                outputs = tiled(*args, tile=(64, 3000), implementation=implementation, **kwargs)
                return [x.cpu() for x in outputs]

            found[implementation] = results(run, on_cuda, targets.cuda(), use, **options)
        for name, value in expected.items():
            bound = 2 * relative_error(found["torch"][name], value) + 4 * torch.finfo(torch.float32).eps
            assert relative_error(found["triton"][name], value) <= bound, (use, name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_peak_memory_of_a_large_head():
    """32K pairs, hidden 1536, vocabulary 157,184: at most 1 GiB, both gradients included."""
    hidden = torch.randn(32768, 1536, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(157184, 1536, device="cuda", dtype=torch.bfloat16).mul_(0.02).requires_grad_()
    targets = torch.randint(0, 157184, (32768,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_log_probs(hidden, weight, targets).log_probs.sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 2**30


@pytest.mark.parametrize("num_rows", [0, 1, 255, 4346, 32768, 40_000, 10**6])
@pytest.mark.parametrize("implementation, megabytes", [("triton", 256), ("triton_gemm", 352), ("torch", 128)])
def test_default_tiles_are_full_and_bounded(implementation, megabytes, num_rows):
    """Memory is what the docstring says, and hardly less is used: bf16 for Triton, fp32 for torch."""
    rows, entries = _default_tile(num_rows, implementation)
    size = rows * entries * (4 if implementation == "torch" else 2) / 2**20
    assert 1 <= rows <= max(1, num_rows) and 0.9 * megabytes <= size <= megabytes
