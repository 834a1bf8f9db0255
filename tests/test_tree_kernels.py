"""The Triton code of the tree kernels against its torch twins: on a GPU, or on the CPU in Triton's interpreter.

    TRITON_INTERPRET=1 python -m pytest tests/test_tree_kernels.py

The interpreter needs Triton, flash-linear-attention and NumPy before 2.4, and runs fp32. Autotuning is cut to one
configuration there, since it has no clock.
"""

import os

import numpy as np
import pytest
import torch
from forests import random_forest, shapes
from test_linear_attention import errors, make_inputs, relative_error

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kda
from harts_hf.kernels.row_sums import RowSums
from harts_hf.kernels.tree_conv import tree_causal_conv
from harts_hf.planning.sequences import MAX_GROUP
from harts_hf.tree import PrefixTree

VOCAB = 50
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and not torch.cuda.is_available()
DEVICE = "cpu" if IS_INTERPRETED else "cuda"
# fp32 products round inputs to tf32 inside chunks on a GPU (upstream's kernels do), 2 ** -11 each.
TOLERANCE = 1e-5 if IS_INTERPRETED else 3e-3
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() and not IS_INTERPRETED,
        reason="needs a CUDA device, or TRITON_INTERPRET=1 with Triton and flash-linear-attention",
    ),
]


@pytest.fixture(autouse=IS_INTERPRETED)
def interpreter(monkeypatch):
    import contextlib

    from triton.runtime.autotuner import Autotuner

    original = Autotuner.run

    def run(self, *args, **kwargs):
        self.configs = self.configs[:1]
        return original(self, *args, **kwargs)

    monkeypatch.setattr(Autotuner, "run", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())


def chunk_end_rows(tree, size):
    """Rows that are the last of a full chunk."""
    return np.flatnonzero(tree.position_ids % size == size - 1)


def compare(kind, sequences, *, size=64, heads=(1, 2), dims=(16, 16), initial=False, num_boundaries=0, seed=0):
    """Outputs, boundary states and all gradients of the tree kernels and of the twin."""
    from harts_hf.kernels.linear_attention_tree import run_tree

    tree = PrefixTree.from_sequences(sequences)
    rng = np.random.default_rng(seed)
    ends = chunk_end_rows(tree, size)
    boundary_rows = rng.permutation(ends)[:num_boundaries].tolist()
    batch = CompactBatch(tree, device=DEVICE)
    layout = batch.chunk_layout(size, boundary_rows)
    inputs = [
        x.to(DEVICE) for x in make_inputs(kind, tree.num_rows, seed, heads=heads, dims=dims, dtype=torch.float32)
    ]
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(DEVICE)

    states = normal(layout.num_roots, heads[1], *dims) if initial else None
    weights = normal(tree.num_rows, heads[1], dims[1]), normal(len(boundary_rows), heads[1], *dims)
    scale = dims[0] ** -0.5

    def results(function, dtype):
        leaves = [None if x is None else x.detach().clone().to(dtype).requires_grad_() for x in (*inputs, states)]
        output, ends = function(*leaves)
        ((output * weights[0].to(dtype)).sum() + (ends * weights[1].to(dtype)).sum()).backward()
        names = ("output", "states", "q", "k", "v", "g", "beta", "initial")
        return dict(zip(names, (output, ends, *(x.grad for x in leaves if x is not None)), strict=False))

    def tree_function(q, k, v, g, beta, initial_states):
        options = {"scale": scale, "use_qk_l2norm": True, "safe_gate": False}
        return run_tree(q, k, v, g, beta, initial_states, layout.sequences, **options)

    def twin(q, k, v, g, beta, initial_states):
        function = tree_kda if kind == "kda" else tree_gated_delta_rule
        options = {"initial_states": initial_states, "use_qk_l2norm": True, "implementation": "torch"}
        return function(q, k, v, g, beta, layout, **options)

    actual, expected = results(tree_function, torch.float32), results(twin, torch.float64)
    names = [name for name, x in expected.items() if x.numel()]
    found = errors({name: actual[name].detach() for name in names}, {name: expected[name].detach() for name in names})
    for name, error in found.items():
        assert error < TOLERANCE, f"{name} differs by {error:.1e} (seed {seed})"
    return layout


@pytest.mark.parametrize("kind", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("shape", ["fork at 129", "star", "two-level", "deep chain with nested prefixes"])
def test_shapes(kind, shape):
    compare(kind, SHAPES[shape][:8], num_boundaries=2)


@pytest.mark.parametrize("kind", ["kda", "gated_delta_rule"])
@pytest.mark.parametrize("seed", range(3))
def test_random_forests_with_initial_states_and_boundaries(kind, seed):
    """Several trees, forks at many depths: states enter at roots and leave at chunk ends, some both."""
    rng = np.random.default_rng(seed)
    sequences = [np.concatenate([[2 + r], s]) for r in range(2) for s in random_forest(rng, 4, 200, 5)]
    size = 32 if kind == "kda" and seed == 1 else 64
    dims = ((16, 16), (24, 8), (16, 40))[seed]
    compare(kind, sequences, size=size, dims=dims, initial=True, num_boundaries=4, seed=seed)


def test_more_branches_than_a_group_holds():
    """Gradients of a boundary come from several groups; each row at the fork is replayed by all of them."""
    rng = np.random.default_rng(3)
    trunk = rng.integers(2, 20, 66)
    branches = [np.append(trunk, [20 + i]) for i in range(MAX_GROUP + 3)]
    layout = compare("gated_delta_rule", branches, heads=(1, 1), dims=(16, 16))
    assert layout.sequences.num_groups == 3  # the root's, and two of the boundary
    assert len(layout.sequences.sums.stages) == 2


@pytest.mark.parametrize("kind", ["kda", "gated_delta_rule"])
def test_slices_of_one_projection_have_the_bits_of_copies(kind):
    """Queries, keys and values as models give them: slices of one tensor, whose rows lie apart."""
    from harts_hf.kernels.linear_attention_tree import run_tree

    batch = CompactBatch(PrefixTree.from_sequences(SHAPES["fork at 129"]), device=DEVICE)
    layout = batch.chunk_layout(64, []).sequences
    made = make_inputs(kind, batch.num_rows, 0, heads=(2, 2), dims=(16, 16), dtype=torch.float32)
    q, k, v, g, beta = (x.to(DEVICE) for x in made)
    weights = torch.randn(v.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)

    def run(queries, keys, values):
        options = {"scale": 0.25, "use_qk_l2norm": True, "safe_gate": False}
        return run_tree(queries, keys, values, g, beta, None, layout, **options)[0]

    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    expected = run(*leaves)
    gradients = torch.autograd.grad(expected, leaves, weights)
    joined = torch.cat([x.flatten(1) for x in (q, k, v)], dim=1).requires_grad_()
    slices = [x.unflatten(1, (2, 16)) for x in joined.split(32, dim=1)]
    assert not any(x.is_contiguous() for x in slices)
    actual = run(*slices)
    (gradient,) = torch.autograd.grad(actual, joined, weights)
    assert torch.equal(actual, expected)
    assert torch.equal(gradient, torch.cat([x.flatten(1) for x in gradients], dim=1))


@pytest.mark.parametrize(
    "width, activation, has_bias", [(4, "silu", True), (4, None, False), (3, "silu", False), (6, "silu", True)]
)
def test_convolution(width, activation, has_bias):
    batch = CompactBatch(PrefixTree.from_sequences(SHAPES["star"] + SHAPES["two-level"]), device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias, weights = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((batch.num_rows, 300), (300, width), (300,), (batch.num_rows, 300))
    )
    results = []
    for implementation, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [
            t.detach().clone().to(dtype).requires_grad_() for t in ((x, weight, bias) if has_bias else (x, weight))
        ]
        options = {"activation": activation, "implementation": implementation}
        output = tree_causal_conv(*leaves, *(() if has_bias else (None,)), batch.conv_layout(width), **options)
        (output * weights.to(dtype)).sum().backward()
        results.append([output.detach(), *(t.grad for t in leaves)])
    for actual, expected in zip(*results, strict=True):
        assert relative_error(actual, expected) < 1e-6


@pytest.mark.parametrize("max_part", [2, 3, 100])
def test_sums_of_rows_in_stages(max_part):
    from harts_hf.kernels.gather_rows_triton import gather, sum_rows

    rng = np.random.default_rng(4)
    index = torch.from_numpy(rng.integers(-1, 7, 60) ** 2 - 1).to(DEVICE)  # some rows have none, some are dropped
    values = torch.randn(60, 3, 11, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    sums = RowSums.from_index(index, 50, max_part)
    assert len(sums.stages) > 1 or max_part == 100
    expected = torch.zeros(50, 3, 11, dtype=torch.float64)
    for i, row in enumerate(index.tolist()):
        if row >= 0:
            expected[row] += values[i].double().cpu()
    actual = sum_rows(values, sums, torch.float32)
    assert relative_error(actual, expected) < 1e-6
    back = gather(actual, index).cpu()
    assert gather(actual, index, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(back[index.cpu() < 0], torch.zeros_like(back[index.cpu() < 0]))
    assert torch.equal(back[index.cpu() >= 0], actual.cpu()[index.cpu()[index.cpu() >= 0]])
    apart = torch.cat([actual.flatten(1), actual.flatten(1)], dim=1)[:, 4:37].unflatten(1, (3, 11))
    assert apart.stride(0) == 66 and torch.equal(gather(apart, index), gather(apart.contiguous(), index))
    across = actual.transpose(1, 2)  # no row in one piece
    assert torch.equal(gather(across, index), gather(across.contiguous(), index))


@pytest.mark.parametrize("max_part", [2, 100])
@pytest.mark.parametrize("heads, group, dim", [(2, 3, 24), (3, 1, 16)])
def test_norms_of_gathered_rows(heads, group, dim, max_part):
    """Against a gather, a norm and their derivative in torch: several reads of a row, several value heads of a key."""
    from harts_hf.kernels.normalized_rows_triton import gather_normalized, sum_normalized_gradients

    rows = torch.tensor([3, 0, 1, 2, 3, 3, 4, 0, 3])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, heads, dim, generator=generator)
    d_y = torch.randn(len(rows), heads * group, dim, generator=generator)
    leaf = x.double().requires_grad_()
    read = leaf[rows]
    expected = read / (read.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    (gradient,) = torch.autograd.grad((expected * d_y.double().unflatten(1, (heads, group)).sum(2)).sum(), leaf)

    y, rstd = gather_normalized(x.to(DEVICE), rows.to(DEVICE))
    assert relative_error(y, expected.detach()) < 1e-6
    apart = torch.cat([x, x], dim=1).to(DEVICE)[:, :heads]  # rows two heads' worth apart
    assert torch.equal(gather_normalized(apart, rows.to(DEVICE))[0], y)
    positions = torch.tensor([7, 2, 3, 8, 6])  # any entry that holds the row
    sums = RowSums.from_index(rows.to(DEVICE), len(x), max_part)
    assert (len(sums.stages) > 1) == (max_part == 2)
    actual = sum_normalized_gradients(d_y.to(DEVICE), y, rstd, positions.to(DEVICE), sums)
    assert relative_error(actual, gradient) < 1e-6


@pytest.mark.parametrize("has_bias, softcap", [(False, None), (True, 5.0)])
def test_tiles_of_logits(has_bias, softcap):
    """Sums and gradients of a tile that is wider than a program's block, with targets inside of it and outside."""
    from harts_hf.kernels import log_probs_torch, log_probs_triton

    generator = torch.Generator().manual_seed(0)
    width = log_probs_triton.BLOCK + 37
    columns = torch.tensor([0, width - 1, -1, width, 5], device=DEVICE)
    logits, earlier = (3 * torch.randn(5, width, generator=generator).to(DEVICE) for _ in range(2))
    bias = torch.randn(width, generator=generator).to(DEVICE) if has_bias else None
    per_row = torch.randn(3, 5, generator=generator).to(DEVICE)
    transform = log_probs_torch.Transform(0.7, softcap, 1.3)
    outside = torch.full_like(columns, -1)
    results = []
    for module, dtype in ((log_probs_triton, torch.float32), (log_probs_torch, torch.float64)):
        sums = log_probs_torch.SoftmaxSums.start(5, dtype, columns.device)
        tile_bias = None if bias is None else bias.to(dtype)
        for tile, targets in ((earlier, outside), (logits, columns)):
            module.fold_tile(tile.to(dtype, copy=True), tile_bias, targets, transform, sums, True)
        log_z = sums.largest + sums.total.log()
        gradient = module.tile_gradient(
            logits.to(dtype, copy=True), tile_bias, columns, transform, log_z, *per_row.to(dtype)
        )
        results.append((*sums, gradient))
    is_inside = (columns >= 0) & (columns < width)
    for name, actual, expected in zip((*sums._fields, "gradient"), *results, strict=True):
        if name == "target_logit":
            assert torch.equal(actual.isnan(), ~is_inside) and torch.equal(expected.isnan(), ~is_inside)
            actual, expected = actual[is_inside], expected[is_inside]
        assert relative_error(actual, expected) < 1e-5, name


@pytest.mark.parametrize("kind", ["kda", "gated_delta_rule"])
def test_kept_intermediates_give_the_bits_of_computed_ones(kind):
    from harts_hf.kernels.linear_attention_tree import run_tree

    batch = CompactBatch(PrefixTree.from_sequences(SHAPES["fork at 129"]), device=DEVICE)
    inputs = make_inputs(kind, batch.num_rows, 7, heads=(1, 2), dims=(16, 16), dtype=torch.float32)
    layout = batch.chunk_layout().sequences
    results, kept_bytes = [], []
    for keep in (False, True):
        leaves = [x.to(DEVICE).requires_grad_() for x in inputs]
        saved = []

        def pack(tensor, saved=saved):
            saved.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output, _ = run_tree(
                *leaves, None, layout, scale=0.25, use_qk_l2norm=True, safe_gate=False, keep_intermediates=keep
            )
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
        kept_bytes.append(sum(saved))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert kept_bytes[1] > kept_bytes[0]


# Triton's interpreter cuts bf16 where the device rounds it.
@pytest.mark.parametrize("dtype", [torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"))
def test_convolution_of_narrow_rows_with_fp32_weights_is_that_of_cast_rows(dtype):
    """Bit for bit: only copies in fp32 are saved."""
    from harts_hf.kernels.tree_conv_triton import run_tree_conv

    batch = CompactBatch(PrefixTree.from_sequences(SHAPES["star"]), device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batch.num_rows, 20, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(20, 4, generator=generator).to(DEVICE)
    grad = torch.randn(batch.num_rows, 20, generator=generator).to(DEVICE, dtype)
    results = []
    for rows in (x, x.float()):
        leaves = [rows.requires_grad_(), weight.clone().requires_grad_()]
        output = run_tree_conv(*leaves, None, batch.conv_layout(4), use_silu=True)
        gradients = torch.autograd.grad(output, leaves, grad.to(output.dtype))
        results.append((output.detach().to(dtype), gradients[0].to(dtype), gradients[1]))
    assert results[0][1].dtype == dtype
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_wrong_source_is_caught():
    """Negative control: a branch that starts from another branch's state."""
    from harts_hf.kernels.linear_attention_tree import run_tree

    batch = CompactBatch(PrefixTree.from_sequences(SHAPES["fork at 129"]), device=DEVICE)
    layout = batch.chunk_layout().sequences
    inputs = [
        x.to(DEVICE) for x in make_inputs("gated_delta_rule", batch.num_rows, 5, dims=(16, 16), dtype=torch.float32)
    ]
    options = {"scale": 0.25, "use_qk_l2norm": True, "safe_gate": False}
    right, _ = run_tree(*inputs, None, layout, **options)
    layout.sequences.source[-1] = 0
    wrong, _ = run_tree(*inputs, None, layout, **options)
    assert relative_error(wrong, right) > 1e-2
