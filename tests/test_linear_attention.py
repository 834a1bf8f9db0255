"""KDA and Gated DeltaNet on a tree equal the token recurrence on each trajectory alone: outputs and every gradient.

The ladder: in fp64 the chunkwise twin, the token reference and the schedule of packed calls are compared with a
recurrence over expanded trajectories, written here, on every shape of tree. In fp32 and bf16 the twin's error against
fp64 may be twice that of Transformers' own function on each trajectory alone, plus a rounding. On a GPU the same holds
for the packed calls against flash-linear-attention on each trajectory alone.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from forests import random_forest, shapes

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kda
from harts_hf.kernels.linear_attention_packed import run_packed_calls
from harts_hf.tree import PrefixTree

VOCAB = 50
TREE_FUNCTIONS = {"kda": tree_kda, "gated_delta_rule": tree_gated_delta_rule}
KINDS = tuple(TREE_FUNCTIONS)
NAMES = ("output", "q", "k", "v", "g", "beta")
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))
FP64_TOLERANCE = 1e-12  # a few hundred roundings of 1e-16 in sequence; measured: 5e-15 at most


class Expanded:
    """The trajectories of a tree side by side, padded on the right, where padding changes no causal function."""

    def __init__(self, tree: PrefixTree, seed: int, num_heads: int, value_dim: int):
        rows = [tree.rows(i) for i in range(tree.num_trajectories)]
        self.rows = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
        self.valid = torch.zeros_like(self.rows, dtype=torch.bool)
        for i, r in enumerate(rows):
            self.rows[i, : len(r)] = torch.from_numpy(r)
            self.valid[i, : len(r)] = True
        generator = torch.Generator().manual_seed(seed)
        # A different weight for each token of each trajectory, as a loss has.
        self.weights = torch.randn(*self.rows.shape, num_heads, value_dim, generator=generator, dtype=torch.float64)

    def results(self, function, inputs: list[torch.Tensor], is_tree: bool) -> dict[str, torch.Tensor]:
        """Output of every trajectory's tokens `[S, H, V]` and gradients of the inputs, whose rows are the tree's."""
        inputs = [x.detach().clone().requires_grad_() for x in inputs]
        rows, valid = self.rows.to(inputs[0].device), self.valid.to(inputs[0].device)
        if is_tree:  # in fp32 at least, so that the gradients of a row's readers add up before they are rounded
            output = function(*inputs)
            output = output.to(torch.promote_types(output.dtype, torch.float32))[rows]
        else:
            output = function(*(x[rows] for x in inputs))
        weights = self.weights.to(output)
        (output * weights)[valid].sum().backward()
        values = (output.detach()[valid], *(x.grad for x in inputs))
        return dict(zip(NAMES, values, strict=True))


def recurrence(q, k, v, g, beta, scale, use_qk_l2norm, initial_state=None):
    """Token recurrence over `[N, T, heads, dim]`; outputs, and states after each token."""
    heads = v.shape[2] // q.shape[2]
    q, k = (x.repeat_interleave(heads, dim=2) for x in (q, k))
    if use_qk_l2norm:
        q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    decay = (g if g.dim() == 4 else g[..., None].expand_as(k)).exp()
    state = torch.zeros(len(q), *k.shape[2:], v.shape[-1], dtype=k.dtype) if initial_state is None else initial_state
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = torch.einsum("nhk,nhkv->nhkv", decay[:, t], state)
        error = v[:, t] - torch.einsum("nhk,nhkv->nhv", k[:, t], state)
        state = state + torch.einsum("nhk,nhv,nh->nhkv", k[:, t], error, beta[:, t])
        outputs.append(scale * torch.einsum("nhk,nhkv->nhv", q[:, t], state))
        states.append(state)
    return torch.stack(outputs, dim=1), states


def packed_recurrence(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale,
    use_qk_l2norm_in_kernel,
    initial_state,
    output_final_state,
    cu_seqlens,
    cu_seqlens_cpu,
):
    """flash-linear-attention's packed signature, by the token recurrence."""
    assert initial_state.dtype == torch.promote_types(q.dtype, torch.float32)
    assert torch.equal(cu_seqlens, cu_seqlens_cpu)
    begins, ends = cu_seqlens[:-1], cu_seqlens[1:]
    lengths = ends - begins
    index = (begins[:, None] + torch.arange(int(lengths.max()))).minimum(ends[:, None] - 1)
    outputs, states = recurrence(
        *(x[0][index] for x in (q, k, v, g, beta)), scale, use_qk_l2norm_in_kernel, initial_state
    )
    final = torch.stack([states[n - 1][i] for i, n in enumerate(lengths.tolist())])
    return torch.cat([outputs[i, :n] for i, n in enumerate(lengths.tolist())])[None], (
        final if output_final_state else None
    )


def make_inputs(kind, num_rows, seed, heads=(1, 2), dims=(8, 5), decay="mixed", dtype=torch.float64):
    """q, k, v, g, beta of random rows. `heads`: of q and k, and of v; `dims`: K and V."""
    generator = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    q, k = normal(num_rows, heads[0], dims[0]), normal(num_rows, heads[0], dims[0])
    v = normal(num_rows, heads[1], dims[1])
    gate_shape = (num_rows, heads[1], dims[0]) if kind == "kda" else (num_rows, heads[1])
    uniform = torch.rand(gate_shape, generator=generator, dtype=torch.float64)
    g = {"none": 0 * uniform, "slow": -1e-3 * uniform, "mixed": -5 * uniform**4, "fast": -5 + 0 * uniform}[decay]
    beta = torch.rand(num_rows, heads[1], generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in (q, k, v, g, beta)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of the expected; the difference alone where nothing is expected."""
    difference = (actual.double().cpu() - expected.double().cpu()).square().mean().sqrt().item()
    size = expected.double().square().mean().sqrt().item()
    return difference / size if size > 0 else difference


def errors(actual: dict, expected: dict) -> dict[str, float]:
    return {name: relative_error(actual[name], expected[name]) for name in expected}


def setting(sequences, kind, seed, chunk_size=64, **options):
    """Layout, inputs and expanded trajectories of one case."""
    batch = CompactBatch(PrefixTree.from_sequences(sequences))
    inputs = make_inputs(kind, batch.num_rows, seed, **options)
    expanded = Expanded(batch.tree, seed, *inputs[2].shape[1:])
    return batch.chunk_layout(chunk_size), inputs, expanded


def tree_results(kind, layout, inputs, expanded, implementation="torch", use_qk_l2norm=True):
    function = functools.partial(
        TREE_FUNCTIONS[kind], layout=layout, use_qk_l2norm=use_qk_l2norm, implementation=implementation
    )
    return expanded.results(lambda *x: function(*x).output, inputs, is_tree=True)


def rounds_results(layout, inputs, expanded, packed=packed_recurrence):
    scale = inputs[0].shape[-1] ** -0.5
    options = {"scale": scale, "use_qk_l2norm": True, "packed": packed}
    return expanded.results(
        lambda *x: run_packed_calls(*x, None, layout.packed_calls, **options)[0], inputs, is_tree=True
    )


def alone_results(inputs, expanded, use_qk_l2norm=True):
    scale = inputs[0].shape[-1] ** -0.5
    return expanded.results(lambda *x: recurrence(*x, scale, use_qk_l2norm)[0], inputs, is_tree=False)


def assert_exact(actual, expected, context):
    for name, error in errors(actual, expected).items():
        assert error < FP64_TOLERANCE, f"{context}: {name} differs by {error:.1e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_equals_trajectories_alone(shape, kind):
    layout, inputs, expanded = setting(SHAPES[shape], kind, seed=1)
    expected = alone_results(inputs, expanded)
    assert_exact(tree_results(kind, layout, inputs, expanded), expected, "torch")
    assert_exact(rounds_results(layout, inputs, expanded), expected, "rounds")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(12))
def test_random_forests_equal_trajectories_alone(seed, kind):
    """Small chunks: many levels, rounds and replays in few tokens."""
    rng = np.random.default_rng(seed)
    sequences = random_forest(rng, VOCAB, max_tokens=60, max_trajectories=10)
    chunk_size = (1, 2, 4, 8, 16, 32)[seed % 6]
    heads, dims = ((1, 1), (2, 4), (3, 3))[seed % 3], ((8, 8), (6, 10), (1, 3), (7, 2))[seed % 4]
    layout, inputs, expanded = setting(sequences, kind, seed, chunk_size, heads=heads, dims=dims)
    expected = alone_results(inputs, expanded)
    context = f"seed {seed}, chunk size {chunk_size}, lengths {[len(s) for s in sequences]}"
    assert_exact(tree_results(kind, layout, inputs, expanded), expected, f"torch, {context}")
    assert_exact(rounds_results(layout, inputs, expanded), expected, f"rounds, {context}")
    assert_exact(tree_results(kind, layout, inputs, expanded, "reference"), expected, f"reference, {context}")


@pytest.mark.parametrize("kind", KINDS)
def test_scale_and_unnormalised_keys(kind):
    layout, inputs, expanded = setting(SHAPES["star"], kind, seed=2)
    inputs[1] *= 0.2  # a key much longer than 1 makes the delta rule diverge
    expected = expanded.results(lambda *x: recurrence(*x, 0.7, False)[0], inputs, is_tree=False)
    for implementation in ("torch", "reference"):
        function = functools.partial(TREE_FUNCTIONS[kind], layout=layout, scale=0.7, implementation=implementation)
        found = expanded.results(lambda *x, f=function: f(*x).output, inputs, is_tree=True)
        assert_exact(found, expected, implementation)


def transformers_function(kind):
    """Transformers' torch function on `[N, T, heads, dim]`, which computes in fp32."""
    if kind == "kda":
        from transformers.models.bailing_hybrid import modeling_bailing_hybrid as modeling

        function = modeling.chunk_kimi_delta_attention
    else:
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        function = modeling.torch_chunk_gated_delta_rule
    return lambda q, k, v, g, beta: function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "slow", "mixed", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_precision_is_that_of_transformers(kind, decay, dtype):
    """Error against fp64 at most twice that of Transformers' function on each trajectory alone, plus one rounding.

    A gate of -5 over a chunk is a decay of exp(-320): no output and no gradient may overflow.
    """
    rng = np.random.default_rng(3)
    trunk = rng.integers(2, VOCAB, 150)
    sequences = [trunk, np.concatenate([trunk[:100], rng.integers(2, VOCAB, 40)]), trunk[:65]]
    heads = (2, 2) if kind == "kda" else (1, 2)  # Transformers' KDA has no grouped heads
    layout, inputs, expanded = setting(sequences, kind, seed=3, heads=heads, dims=(24, 16), decay=decay, dtype=dtype)
    expected = alone_results([x.double() for x in inputs], expanded)
    baseline = errors(expanded.results(transformers_function(kind), inputs, is_tree=False), expected)
    actual = tree_results(kind, layout, inputs, expanded)
    assert all(torch.isfinite(value).all() for value in actual.values())
    for name, error in errors(actual, expected).items():
        bound = 2 * baseline[name] + torch.finfo(dtype).eps
        assert error <= bound, f"{name}: {error:.1e} against {baseline[name]:.1e} of Transformers"


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_layouts_are_caught(kind):
    """Negative control: dropped replay, a wrong initial state and a wrong parent change outputs and gradients."""
    sequences = SHAPES["fork at 129"] + SHAPES["star"] + SHAPES["no sharing"]
    layout, inputs, expanded = setting(sequences, kind, seed=4, decay="slow")
    expected = alone_results(inputs, expanded)

    def replace(**fields):
        return dataclasses.replace(layout, **fields)

    owned = torch.zeros(layout.rows.numel(), dtype=torch.bool)
    owned[layout.output_slot] = True
    without_replay = torch.where(owned.view_as(layout.rows), layout.rows, -1)
    assert (without_replay != layout.rows).any()
    begin, end = layout.level_offsets[1:3]
    other_parent, no_state = layout.parent.clone(), layout.parent.clone()
    other_parent[begin:end] = layout.parent[begin:end].roll(1)
    assert (other_parent != layout.parent).any()
    no_state[begin] = -1
    for wrong in (replace(rows=without_replay), replace(parent=other_parent), replace(parent=no_state)):
        found = errors(tree_results(kind, wrong, inputs, expanded), expected)
        assert found["output"] > 1e-3 and found["k"] > 1e-3

    calls = list(layout.packed_calls.calls)
    calls[1] = dataclasses.replace(calls[1], source=torch.full_like(calls[1].source, -1))
    wrong_calls = dataclasses.replace(layout.packed_calls, calls=tuple(calls))
    found = errors(rounds_results(replace(make_packed_calls=lambda: wrong_calls), inputs, expanded), expected)
    assert found["output"] > 1e-3 and found["k"] > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_a_branch_does_not_touch_others(kind):
    """Other trajectories' outputs stay bit for bit when one branch's rows change, even to huge values."""
    sequences = SHAPES["fork at 127"] + SHAPES["star"] + SHAPES["two-level"]
    batch = CompactBatch(PrefixTree.from_sequences(sequences))
    layout = batch.chunk_layout()
    inputs = make_inputs(kind, batch.num_rows, seed=5, dtype=torch.float32)
    function = functools.partial(TREE_FUNCTIONS[kind], layout=layout, use_qk_l2norm=True)
    before = function(*inputs).output
    for i in range(len(sequences)):
        rows = batch.rows[i]
        own = torch.from_numpy(rows[batch.tree.counts[rows] == 1])
        others = torch.ones(batch.num_rows, dtype=torch.bool)
        others[own] = False
        changed = [x.clone() for x in inputs]
        for x in changed[:3]:
            x[own] = 1e3 * torch.randn_like(x[own])
        after = function(*changed).output
        assert torch.equal(after[others], before[others])
        assert len(own) == 0 or not torch.equal(after[own], before[own])


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_does_not_lower_the_precision(kind):
    layout, inputs, _ = setting(SHAPES["star"], kind, seed=6, dtype=torch.float32)
    plain = TREE_FUNCTIONS[kind](*inputs, layout).output
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(TREE_FUNCTIONS[kind](*inputs, layout).output, plain)


def test_inputs_that_do_not_fit_raise():
    layout, (q, k, v, g, beta), _ = setting(SHAPES["star"], "kda", seed=7, dtype=torch.float32)
    with pytest.raises(ValueError, match="no batch dim"):
        tree_kda(q[None], k[None], v[None], g, beta, layout)
    with pytest.raises(ValueError, match="rows"):
        tree_kda(q[1:], k[1:], v[1:], g[1:], beta[1:], layout)
    with pytest.raises(ValueError, match="must divide"):
        tree_kda(q.expand(-1, 3, -1), k.expand(-1, 3, -1), v, g, beta, layout)
    with pytest.raises(ValueError, match="g must have shape"):
        tree_gated_delta_rule(q, k, v, g, beta, layout)
    with pytest.raises(ValueError, match="beta must have shape"):
        tree_kda(q, k, v, g, beta[:, :1], layout)
    with pytest.raises(ValueError, match="dtype"):
        tree_kda(q.bfloat16(), k, v, g, beta, layout)
    with pytest.raises(ValueError, match=r"unknown implementation 'triton', expected one of \('tree', 'torch', "):
        tree_kda(q, k, v, g, beta, layout, implementation="triton")
    for implementation in ("tree", "rounds", "nodewise"):
        with pytest.raises(ValueError, match="needs CUDA tensors"):
            tree_kda(q, k, v, g, beta, layout, implementation=implementation)
    odd_chunks = setting(SHAPES["star"], "kda", seed=7, chunk_size=48, dtype=torch.float32)[0]
    with pytest.raises(ValueError, match="power of two"):
        tree_kda(q, k, v, g, beta, odd_chunks)


def run_implementation(kind, implementation, layout, inputs, initial_states):
    """Outputs and requested states; the packed schemes by the token recurrence, in place of kernels."""
    if implementation in ("torch", "reference"):
        options = {"use_qk_l2norm": True, "initial_states": initial_states, "implementation": implementation}
        return TREE_FUNCTIONS[kind](*inputs, layout, **options)
    calls = layout.packed_calls if implementation == "rounds" else layout.node_calls
    options = {"scale": inputs[0].shape[-1] ** -0.5, "use_qk_l2norm": True, "packed": packed_recurrence}
    return run_packed_calls(*inputs, initial_states, calls, **options)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", ["torch", "reference", "rounds"])
def test_a_state_handed_over_continues_the_trajectories(kind, implementation):
    """A forest cut at a chunk boundary: outputs and every gradient, the state's included, as without the cut."""
    rng = np.random.default_rng(11)
    trunks = [rng.integers(2, VOCAB, 40) for _ in range(2)]
    sequences = [np.concatenate([t[:p], rng.integers(2, VOCAB, 9)]) for t in trunks for p in (18, 27, 40)]
    whole = CompactBatch(PrefixTree.from_sequences(sequences))
    producer = CompactBatch(PrefixTree.from_sequences([t[:16] for t in trunks]))
    consumer = CompactBatch(PrefixTree.from_sequences([s[16:] for s in sequences]))
    rows = torch.empty(consumer.num_rows, dtype=torch.int64)
    for own, full in zip(consumer.rows, whole.rows, strict=True):
        rows[torch.from_numpy(own)] = torch.from_numpy(full[16:])
    shared = torch.empty(producer.num_rows, dtype=torch.int64)
    for own, full in zip(producer.rows, whole.rows[::3], strict=True):
        shared[torch.from_numpy(own)] = torch.from_numpy(full[:16])
    # the consumer's roots in row order, and the producer row after which each one's state stands
    first = {int(consumer.rows[i][0]): int(producer.rows[i // 3][-1]) for i in range(len(sequences))}
    ends = [first[root] for root in sorted(first)]
    inputs = make_inputs(kind, whole.num_rows, seed=12)
    weights = torch.randn(whole.num_rows, *inputs[2].shape[1:], generator=torch.Generator().manual_seed(13)).double()

    def results(function):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        output = function(leaves)
        (output * weights).sum().backward()
        return dict(zip(NAMES, (output.detach(), *(x.grad for x in leaves)), strict=True))

    def cut(leaves):
        layout = producer.chunk_layout(8, ends)
        before, states = run_implementation(kind, implementation, layout, [x[shared] for x in leaves], None)
        after, _ = run_implementation(
            kind, implementation, consumer.chunk_layout(8), [x[rows] for x in leaves], states
        )
        return torch.zeros_like(weights).index_copy(0, shared, before).index_copy(0, rows, after)

    expected = results(lambda leaves: run_implementation(kind, "reference", whole.chunk_layout(8), leaves, None)[0])
    assert_exact(results(cut), expected, implementation)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_node_calls_equal_trajectories_alone(kind, shape):
    layout, inputs, expanded = setting(SHAPES[shape], kind, seed=14)
    found = expanded.results(lambda *x: run_implementation(kind, "nodewise", layout, x, None)[0], inputs, is_tree=True)
    assert_exact(found, alone_results(inputs, expanded), "nodewise")


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_of_raw_inputs(lower_bound):
    """The gate's formula, written out, in front of the operator: outputs and every gradient."""
    layout, inputs, _ = setting(SHAPES["star"], "kda", seed=15)
    generator = torch.Generator().manual_seed(16)
    A_log, dt_bias = (torch.randn(n, generator=generator, dtype=torch.float64) for n in (2, 16))

    def gradients(function):
        leaves = [x.detach().clone().requires_grad_() for x in (*inputs, A_log, dt_bias)]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output.square().sum(), leaves)]

    def inside(q, k, v, g, beta, A_log, dt_bias):
        options = {"use_gate_in_kernel": True, "A_log": A_log, "dt_bias": dt_bias, "lower_bound": lower_bound}
        return tree_kda(q, k, v, g, beta, layout, **options).output

    def outside(q, k, v, g, beta, A_log, dt_bias):
        rate, raw = A_log.exp()[None, :, None], g + dt_bias.view(1, 2, 8)
        decay = -rate * torch.log1p(raw.exp()) if lower_bound is None else lower_bound / (1 + (-rate * raw).exp())
        return tree_kda(q, k, v, decay, beta, layout).output

    for actual, expected in zip(gradients(inside), gradients(outside), strict=True):
        assert relative_error(actual, expected) < FP64_TOLERANCE


def test_gate_and_state_options_that_do_not_fit_raise():
    layout, inputs, _ = setting(SHAPES["star"], "kda", seed=17, dtype=torch.float32)
    with pytest.raises(ValueError, match="belong to use_gate_in_kernel"):
        tree_kda(*inputs, layout, lower_bound=-5.0)
    with pytest.raises(ValueError, match="needs A_log, or lower_bound"):
        tree_kda(*inputs, layout, use_gate_in_kernel=True)
    with pytest.raises(ValueError, match="safe_gate needs a lower_bound"):
        tree_kda(*inputs, layout, use_gate_in_kernel=True, A_log=torch.zeros(2), safe_gate=True)
    with pytest.raises(ValueError, match="initial_states must have shape"):
        tree_kda(*inputs, layout, initial_states=torch.zeros(3, 2, 8, 5))
    with pytest.raises(ValueError, match="initial_states must be fp32"):
        tree_kda(*inputs, layout, initial_states=torch.zeros(1, 2, 8, 5, dtype=torch.bfloat16))
