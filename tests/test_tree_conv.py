"""The convolution on a tree equals F.conv1d on each trajectory alone: outputs and every gradient."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forests import random_forest, shapes

from harts_hf.batch import CompactBatch
from harts_hf.kernels.conv_layout import ConvLayout
from harts_hf.kernels.tree_conv import tree_causal_conv
from harts_hf.tree import PrefixTree

VOCAB = 50
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))
FP64_TOLERANCE = 1e-13  # sums of W products, and of as many gradients as a row has trajectories


def conv_alone(x, weight, bias, activation):
    """Transformers' `causal_conv1d_fn` on one trajectory `[T, D]`."""
    width = weight.shape[1]
    padded = x.to(weight.dtype).t()[None]  # [1, D, T]
    output = F.conv1d(padded, weight[:, None], bias, padding=width - 1, groups=len(weight))[0, :, : len(x)].t()
    return (output if activation is None else F.silu(output)).to(x.dtype)


def setting(sequences, seed, width=4, dim=6, dtype=torch.float64, weight_dtype=None, has_bias=True):
    """Batch, inputs (x, weight, bias) and the loss's weights for each token of each trajectory."""
    batch = CompactBatch(PrefixTree.from_sequences(sequences))
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch.num_rows, dim, generator=generator).to(dtype)
    weight, bias = (
        torch.randn(*shape, generator=generator).to(weight_dtype or dtype) for shape in ((dim, width), (dim,))
    )
    weights = [torch.randn(len(rows), dim, generator=generator, dtype=torch.float64) for rows in batch.rows]
    return batch, (x, weight, bias if has_bias else None), weights


def results(function, inputs, rows, weights):
    """Outputs of all trajectories' tokens, and gradients. `function(x, weight, bias, rows)` runs one trajectory."""
    inputs = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = [function(*inputs, torch.from_numpy(r)) for r in rows]
    sum((o * w.to(o)).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    return [torch.cat(outputs).detach()] + [x.grad for x in inputs if x is not None]


def tree_results(batch, inputs, weights, layout, activation, implementation=None):
    output = {}  # computed once for all trajectories

    def function(x, weight, bias, rows):
        if not output:
            output["rows"] = tree_causal_conv(
                x, weight, bias, layout, activation=activation, implementation=implementation
            )
        return output["rows"][rows]

    return results(function, inputs, batch.rows, weights)


def alone_results(batch, inputs, weights, activation):
    return results(lambda x, w, b, rows: conv_alone(x[rows], w, b, activation), inputs, batch.rows, weights)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_trajectories_alone(shape):
    batch, inputs, weights = setting(SHAPES[shape], seed=1)
    actual = tree_results(batch, inputs, weights, batch.conv_layout(4), "silu")
    for a, e in zip(actual, alone_results(batch, inputs, weights, "silu"), strict=True):
        assert relative_error(a, e) < FP64_TOLERANCE


@pytest.mark.parametrize("seed", range(8))
def test_random_forests_equal_trajectories_alone(seed):
    sequences = random_forest(np.random.default_rng(seed), VOCAB, max_tokens=30, max_trajectories=10)
    width, activation, has_bias = (1, 2, 3, 4, 5)[seed % 5], (None, "silu", "swish")[seed % 3], seed % 2 == 0
    batch, inputs, weights = setting(sequences, seed, width=width, dim=3, has_bias=has_bias)
    actual = tree_results(batch, inputs, weights, batch.conv_layout(width), activation)
    for a, e in zip(actual, alone_results(batch, inputs, weights, activation), strict=True):
        assert relative_error(a, e) < FP64_TOLERANCE, f"seed {seed}, lengths {[len(s) for s in sequences]}"


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
    ],
)
def test_precision_is_that_of_conv1d(dtype, weight_dtype):
    """Error against fp64 at most twice that of F.conv1d on each trajectory alone, plus one rounding."""
    batch, inputs, weights = setting(SHAPES["star"], seed=2, dtype=dtype, weight_dtype=weight_dtype)
    expected = alone_results(batch, [x.double() for x in inputs], weights, "silu")
    baseline = alone_results(batch, inputs, weights, "silu")
    actual = tree_results(batch, inputs, weights, batch.conv_layout(4), "silu")
    band = max(torch.finfo(dtype).eps, torch.finfo(weight_dtype).eps)
    for a, b, e in zip(actual, baseline, expected, strict=True):
        assert a.dtype == b.dtype
        assert relative_error(a, e) <= 2 * relative_error(b, e) + band


def test_wrong_ancestors_are_caught():
    """Negative control: reading the rows before, as a convolution straight over the rows would, is a leak."""
    batch, inputs, weights = setting(SHAPES["star"], seed=3)
    expected = alone_results(batch, inputs, weights, None)
    rows_before = torch.arange(batch.num_rows)[:, None] + torch.arange(-3, 1)
    actual = tree_results(batch, inputs, weights, ConvLayout(rows_before.clamp(min=-1)), None)
    assert relative_error(actual[0], expected[0]) > 1e-2 and relative_error(actual[1], expected[1]) > 1e-2


def test_a_branch_does_not_touch_others():
    batch, (x, weight, bias), _ = setting(SHAPES["one-token branches"], seed=4, dtype=torch.float32)
    before = tree_causal_conv(x, weight, bias, batch.conv_layout(4))
    for rows in batch.rows:
        own = torch.from_numpy(rows[batch.tree.counts[rows] == 1])
        changed = x.clone()
        changed[own] = float("nan")
        after = tree_causal_conv(changed, weight, bias, batch.conv_layout(4))
        others = torch.ones(batch.num_rows, dtype=torch.bool)
        others[own] = False
        assert torch.equal(after[others], before[others]) and after[own].isnan().all()


def test_inputs_that_do_not_fit_raise():
    batch, (x, weight, bias), _ = setting(SHAPES["star"], seed=5)
    with pytest.raises(ValueError, match="unknown activation 'gelu'"):
        tree_causal_conv(x, weight, bias, batch.conv_layout(4), activation="gelu")
    with pytest.raises(ValueError, match=r"ancestors must be \[C, W\]"):
        tree_causal_conv(x, weight, bias, batch.conv_layout(3))
    with pytest.raises(ValueError, match=r"weight \[D, W\]"):
        tree_causal_conv(x, weight.t(), bias, batch.conv_layout(4))
    with pytest.raises(ValueError, match="bias must have shape"):
        tree_causal_conv(x, weight, bias[1:], batch.conv_layout(4))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_cuda_equals_cpu_and_gradients_are_deterministic(implementation):
    dtype = torch.float64 if implementation == "torch" else torch.float32
    batch, inputs, weights = setting(SHAPES["star"], seed=6, dtype=dtype)
    expected = tree_results(batch, inputs, weights, batch.conv_layout(4), "silu")
    layout = ConvLayout(batch.conv_layout(4).ancestors.cuda())
    on_cuda = [x.cuda() for x in inputs], [w.cuda() for w in weights]
    runs = [tree_results(batch, *on_cuda, layout, "silu", implementation) for _ in range(2)]
    for e, first, second in zip(expected, *runs, strict=True):
        assert torch.equal(first, second)
        assert relative_error(first.cpu(), e) < (FP64_TOLERANCE if implementation == "torch" else 1e-6)
