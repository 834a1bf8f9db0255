"""Attention on a tree equals causal attention on each trajectory alone: outputs and every gradient."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forests import random_forest, shapes
from torch._dynamo.testing import CompileCounter
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers.masking_utils import sliding_window_causal_mask_function

from harts_hf.batch import CompactBatch
from harts_hf.kernels.attention_layout import AttentionLayout
from harts_hf.kernels.tree_attention import _log_once, tree_attention
from harts_hf.kernels.tree_attention_flash4 import attend_flash4, flash4_is_installed
from harts_hf.kernels.tree_attention_flex import _attend, _make_block_mask
from harts_hf.tree import PrefixTree

VOCAB = 50
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))
FP64_TOLERANCE = 1e-13  # softmax over a few hundred keys
SCALE = 0.3


def attention_alone(q, k, v, window, dtype):
    """Causal attention of one trajectory `[heads, T, dim]`, written out; `[T, H, V]`. Softmax in `dtype`."""
    k, v = (x.repeat_interleave(q.shape[0] // x.shape[0], dim=0) for x in (k, v))
    positions = torch.arange(q.shape[1])
    visible = positions[:, None] >= positions
    if window is not None:
        visible = sliding_window_causal_mask_function(window)(0, 0, positions[:, None], positions)
    scores = (SCALE * (q @ k.mT).to(dtype)).masked_fill(~visible, float("-inf"))
    return (scores.softmax(-1).to(v.dtype) @ v).transpose(0, 1)


def setting(sequences, seed, heads=(4, 2), dims=(6, 4), dtype=torch.float64):
    """Batch, inputs (q, k, v) and the loss's weights. `heads`: of queries, and of keys; `dims`: K and V."""
    batch = CompactBatch(PrefixTree.from_sequences(sequences))
    normal = torch.Generator().manual_seed(seed)
    sizes = ((heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1]))
    inputs = [torch.randn(1, h, batch.num_rows, d, generator=normal).to(dtype) for h, d in sizes]
    weights = [torch.randn(len(r), heads[0], dims[1], generator=normal, dtype=torch.float64) for r in batch.rows]
    return batch, inputs, weights


def results(outputs_of, inputs, weights):
    """Outputs of all trajectories' tokens `[S, H, V]`, and gradients."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = outputs_of(*inputs)
    sum((o * w.to(o)).sum() for o, w in zip(outputs, weights, strict=True)).backward()
    return [torch.cat(outputs).detach(), *(x.grad for x in inputs)]


def tree_results(batch, inputs, weights, window=None, layout=None, implementation=None):
    layout = layout or batch.attention_layout()

    def outputs_of(q, k, v):
        output = tree_attention(q, k, v, layout, scale=SCALE, window=window, implementation=implementation)
        return [output[0, torch.from_numpy(rows)] for rows in batch.rows]

    return results(outputs_of, inputs, weights)


def alone_results(batch, inputs, weights, window=None, dtype=torch.float64):
    def outputs_of(q, k, v):
        return [attention_alone(*(x[0][:, torch.from_numpy(r)] for x in (q, k, v)), window, dtype) for r in batch.rows]

    return results(outputs_of, inputs, weights)


def relative_error(actual, expected):
    return ((actual.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-12)).item()


def assert_exact(actual, expected, context):
    for name, a, e in zip(("output", "q", "k", "v"), actual, expected, strict=True):
        if e.abs().max() > 1e-12:  # a lone token's scores have no gradient
            assert relative_error(a, e) < FP64_TOLERANCE, f"{context}: {name}"
        else:
            assert a.abs().max() < 1e-12, f"{context}: {name}"


@pytest.mark.parametrize("implementation", ["sdpa", "varlen"])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_trajectories_alone(shape, window, implementation):
    batch, inputs, weights = setting(SHAPES[shape], seed=1)
    actual = tree_results(batch, inputs, weights, window, implementation=implementation)
    assert_exact(actual, alone_results(batch, inputs, weights, window), f"{shape}, window {window}")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_mask_of_flex(shape, window):
    """FlexAttention has no backward on the CPU, and does not skip blocks there; the GPU tests have both."""
    batch, inputs, _ = setting(SHAPES[shape], seed=1, dims=(8, 8), dtype=torch.float32)
    layout = batch.attention_layout()
    actual, expected = (
        tree_attention(*inputs, layout, scale=SCALE, window=window, implementation=name) for name in ("flex", "sdpa")
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)  # fp32 rounding over a few hundred keys


def test_flex_compiles_twice_for_any_number_of_trees():
    """Dynamo's guards, without a backend behind them: for the first number of rows, then for any number."""
    counter = CompileCounter()
    compiled = torch.compile(_attend, fullgraph=True, backend=counter)
    rng = np.random.default_rng(0)
    with torch.no_grad():
        for rows in (1, 127, 129, 400, 1025, 300, 700):
            batch, inputs, _ = setting([rng.integers(0, VOCAB, rows)] * 2, rows, dims=(8, 8), dtype=torch.float32)
            block_mask = _make_block_mask(batch.attention_layout(), None)
            padding = block_mask.seq_lengths[0] - rows
            compiled(*(F.pad(x, (0, 0, 0, padding)) for x in inputs), block_mask, SCALE, True)
    assert counter.frame_count <= 2


def test_flex_raises_rather_than_run_uncompiled():
    batch, inputs, _ = setting(SHAPES["star"], seed=1, dims=(8, 8), dtype=torch.float32)
    with pytest.raises(RuntimeError, match="needs torch.compile"):
        _attend(*inputs, _make_block_mask(batch.attention_layout(), None), SCALE, True)


def test_what_cannot_run_says_why():
    batch, inputs, _ = setting(SHAPES["star"], seed=1, dims=(16, 16), dtype=torch.bfloat16)
    layout = batch.attention_layout()
    with pytest.raises(ValueError, match="flash4 runs on Hopper"):
        tree_attention(*inputs, layout, scale=SCALE, implementation="flash4")
    with pytest.raises(ValueError, match="flash4 takes bfloat16 or float16, not torch.float32"):
        tree_attention(*(x.float() for x in inputs), layout, scale=SCALE, implementation="flash4")
    if not flash4_is_installed():
        with pytest.raises(ImportError, match=r"pip install 'harts_hf\[flash4\]'"):
            attend_flash4(*inputs, layout, scale=SCALE)


def test_the_choice_is_logged_once(caplog):
    batch, inputs, _ = setting(SHAPES["star"], seed=1, dtype=torch.float32)
    _log_once.cache_clear()
    with caplog.at_level("INFO", logger="harts_hf.kernels.tree_attention"):
        for _ in range(3):
            tree_attention(*inputs, batch.attention_layout(), scale=SCALE)
    assert [record.getMessage() for record in caplog.records] == ["tree attention runs 'sdpa' on the CPU"]


@pytest.mark.parametrize("seed", range(8))
def test_random_forests_equal_trajectories_alone(seed):
    sequences = random_forest(np.random.default_rng(seed), VOCAB, max_tokens=60, max_trajectories=10)
    heads, dims = ((1, 1), (4, 2), (6, 2), (3, 3))[seed % 4], ((24, 16), (5, 9), (8, 8))[seed % 3]
    batch, inputs, weights = setting(sequences, seed, heads, dims)
    window = (None, 3, 20)[seed % 3]
    actual = tree_results(batch, inputs, weights, window)
    context = f"seed {seed}, lengths {[len(s) for s in sequences]}"
    assert_exact(actual, alone_results(batch, inputs, weights, window), context)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_trajectories_alone(dtype):
    """Error against fp64 at most twice that of attention on each trajectory alone, plus one rounding."""
    batch, inputs, weights = setting(SHAPES["star"], seed=2, dims=(24, 16), dtype=dtype)
    expected = alone_results(batch, [x.double() for x in inputs], weights)
    baseline = alone_results(batch, inputs, weights, dtype=torch.float32)
    for a, b, e in zip(tree_results(batch, inputs, weights), baseline, expected, strict=True):
        assert relative_error(a, e) <= 2 * relative_error(b, e) + torch.finfo(dtype).eps


def test_the_mask_is_that_of_ancestors_within_the_window():
    """Against a walk over parents, and Transformers' own window on positions."""
    batch, _, _ = setting(SHAPES["caterpillar"], seed=3)
    positions = batch.position_ids
    for window in (None, 7):
        expected = torch.zeros(batch.num_rows, batch.num_rows, dtype=torch.bool)
        for row in range(batch.num_rows):
            ancestor = row
            while ancestor >= 0:
                inside = window is None or sliding_window_causal_mask_function(window)(
                    0, 0, positions[row], positions[ancestor]
                )
                expected[row, ancestor] = bool(inside)
                ancestor = int(batch.tree.parent[ancestor])
        mask = batch.attention_layout().dense_mask(window)
        assert torch.equal(mask, expected[None, None])
        additive = batch.attention_layout().dense_mask(window, dtype=torch.float32)
        assert torch.equal(additive == 0, mask) and torch.equal(additive == float("-inf"), ~mask)
    assert batch.attention_layout().dense_mask(7) is batch.attention_layout().dense_mask(7)


def test_wrong_masks_are_caught():
    """Negative control: causal over the rows leaks between branches; a window over rows is not one over positions."""
    batch, inputs, weights = setting(SHAPES["star"], seed=4)
    end = torch.full((batch.num_rows,), batch.num_rows)
    causal = AttentionLayout(end, batch.position_ids)
    actual = tree_results(batch, inputs, weights, layout=causal)
    assert relative_error(actual[0], alone_results(batch, inputs, weights)[0]) > 1e-2
    row_window = AttentionLayout(torch.from_numpy(batch.tree.subtree_end), torch.arange(batch.num_rows))
    actual = tree_results(batch, inputs, weights, window=30, layout=row_window)
    assert relative_error(actual[0], alone_results(batch, inputs, weights, window=30)[0]) > 1e-2


@pytest.mark.parametrize("dims", [(24, 16), (16, 24)])
def test_the_fused_kernel_runs_when_value_and_key_widths_differ(dims):
    batch, inputs, _ = setting(SHAPES["star"], seed=5, dims=dims, dtype=torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # raises if it cannot run
        output = tree_attention(*inputs, batch.attention_layout(), scale=SCALE)
    assert output.shape == (1, batch.num_rows, 4, dims[1]) and output.is_contiguous()


def test_a_branch_does_not_touch_others():
    batch, inputs, _ = setting(SHAPES["two-level"], seed=6, dtype=torch.float32)
    before = tree_attention(*inputs, batch.attention_layout(), scale=SCALE)
    for rows in batch.rows:
        branch = rows[batch.tree.counts[rows] <= 2][0]
        own = torch.arange(branch, batch.tree.subtree_end[branch])
        others = torch.ones(batch.num_rows, dtype=torch.bool)
        others[own] = False
        changed = [x.clone() for x in inputs]
        for x in changed:
            x[:, :, own] = 100 * torch.randn_like(x[:, :, own])
        after = tree_attention(*changed, batch.attention_layout(), scale=SCALE)
        assert torch.equal(after[:, others], before[:, others])
        assert not torch.equal(after[:, own], before[:, own])


def test_inputs_that_do_not_fit_raise():
    batch, (q, k, v), _ = setting(SHAPES["star"], seed=7)
    layout = batch.attention_layout()
    with pytest.raises(ValueError, match=r"unknown implementation 'flash', expected one of \('flash4', "):
        tree_attention(q, k, v, layout, scale=SCALE, implementation="flash")
    with pytest.raises(ValueError, match="one batch entry"):
        tree_attention(*(x.expand(2, -1, -1, -1) for x in (q, k, v)), layout, scale=SCALE)
    with pytest.raises(ValueError, match="Hkv dividing H"):
        tree_attention(q[:, :3], k, v, layout, scale=SCALE)
    with pytest.raises(ValueError, match="the layout has"):
        tree_attention(*(x[:, :, 1:] for x in (q, k, v)), layout, scale=SCALE)
    with pytest.raises(ValueError, match="window must be at least 1"):
        tree_attention(q, k, v, layout, scale=SCALE, window=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_runs_a_fused_kernel_with_the_precision_of_the_cpu():
    batch, inputs, weights = setting(SHAPES["star"], seed=8, dims=(192, 128), dtype=torch.bfloat16)
    expected = alone_results(batch, [x.double() for x in inputs], weights)
    baseline = alone_results(batch, inputs, weights, dtype=torch.float32)
    layout = AttentionLayout(*(x.cuda() for x in (batch.attention_layout().subtree_end, batch.position_ids)))
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]):
        actual = tree_results(batch, [x.cuda() for x in inputs], [w.cuda() for w in weights], layout=layout)
    for a, b, e in zip(actual, baseline, expected, strict=True):
        assert relative_error(a.cpu(), e) <= 2 * relative_error(b, e) + torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("prefix_rows", [1, 100, 129, 200])
@pytest.mark.parametrize("implementation", ["sdpa", "varlen", "flex"])
def test_given_keys_stand_before_the_queries(implementation, prefix_rows):
    """Attention of the rows behind a prefix is that of the whole tree, and so are the gradients of all keys."""
    rng = np.random.default_rng(prefix_rows)
    trunk = rng.integers(2, 50, 230)
    batch, inputs, _ = setting([trunk, *(np.append(trunk[:p], 60 + rng.integers(0, 9, 80)) for p in (200, 215))], 0)
    layout = AttentionLayout(torch.from_numpy(batch.tree.subtree_end), batch.position_ids, prefix_rows)
    dtype = torch.float32 if implementation == "flex" else torch.float64
    inputs = [x.to(dtype) for x in inputs]
    results = []
    for first, options in ((0, {}), (prefix_rows, {"implementation": implementation})):
        q, k, v = (x.clone().requires_grad_(implementation != "flex") for x in inputs)
        whole = AttentionLayout(layout.subtree_end, layout.position_ids)
        for window in (None, 50):
            output = tree_attention(
                q[:, :, first:], k, v, layout if first else whole, scale=SCALE, window=window, **options
            )
            results.append([output[:, prefix_rows - first :]])
            if implementation != "flex":
                results[-1] += torch.autograd.grad(results[-1][0].square().sum(), (q, k, v))
    for expected, actual in zip(results[:2], results[2:], strict=True):
        for e, a in zip(expected, actual, strict=True):
            assert relative_error(a, e) < (1e-6 if implementation == "flex" else FP64_TOLERANCE)


def test_another_version_of_flash_attention_is_named(monkeypatch):
    """Its tiles are those of one version: with another, lists would name other tiles than the kernels walk."""
    import importlib.metadata

    from harts_hf.kernels.tree_attention_flash4 import FLASH4_VERSION, flash4_is_installed

    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.1.0")
    flash4_is_installed.cache_clear()
    with pytest.raises(ImportError, match=f"{FLASH4_VERSION}, but 4.1.0 is installed"):
        flash4_is_installed()
