"""The tree kernels on a GPU: bit for bit a lone trajectory's result, and gradients as good as the stock kernels'."""

import functools
import importlib.metadata

import numpy as np
import pytest
import torch
from forests import random_forest, shapes
from packaging.version import Version
from test_linear_attention import KINDS, NAMES, TREE_FUNCTIONS, Expanded, errors, make_inputs

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention_packed import load_packed_function
from harts_hf.layouts import make_chunk_layout
from harts_hf.planning.rounds import RoundPlan
from harts_hf.tree import PrefixTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device and flash-linear-attention"),
]

VOCAB = 50
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))
HEADS, DIMS = (2, 4), (64, 64)


def ids(rng, n):
    return rng.integers(2, VOCAB, n)


def forks_at_every_offset():
    rng = np.random.default_rng(1)
    trunk = ids(rng, 300)
    return [trunk, *(np.concatenate([trunk[:p], ids(rng, 70 + p % 7)]) for p in range(100, 228))]


def short_branches_with_children():
    """Branches of 1 to 3 tokens, each with branches of its own."""
    rng = np.random.default_rng(2)
    trunk, sequences = ids(rng, 150), []
    for p in range(40, 140, 9):
        branch = np.concatenate([trunk[:p], 50 + ids(rng, 1 + p % 3)])
        sequences += [np.concatenate([branch, ids(rng, n)]) for n in (1, 2, 80)]
    return [trunk, *sequences]


def many_levels():
    """Every branch forks again after 70 tokens: sequences that start from sequences, many times over."""
    rng = np.random.default_rng(3)
    sequences, path = [], ids(rng, 30)
    for _ in range(60):
        sequences.append(np.concatenate([path, 50 + ids(rng, 200)]))
        path = np.concatenate([path, ids(rng, 70)])
    return [*sequences, path]


TREES = {
    "forks at every offset": forks_at_every_offset,
    "short branches with children": short_branches_with_children,
    "many levels": many_levels,
    "prefix 21 of 22": lambda: [ids(np.random.default_rng(4), 22), ids(np.random.default_rng(4), 22)[:21]],
    "random": lambda: random_forest(np.random.default_rng(5), VOCAB, max_tokens=700, max_trajectories=30),
    "shapes": lambda: SHAPES["star"] + SHAPES["caterpillar"] + SHAPES["one-token branches"] + SHAPES["no sharing"],
}


def setting(sequences, kind, dtype=torch.bfloat16, seed=8, heads=HEADS, dims=DIMS, decay="mixed"):
    batch = CompactBatch(PrefixTree.from_sequences(sequences), device="cuda")
    inputs = make_inputs(kind, batch.num_rows, seed, heads=heads, dims=dims, decay=decay, dtype=dtype)
    return batch, [*(x.cuda() for x in inputs[:3]), inputs[3].float().cuda(), inputs[4].cuda()]


def run(kind, inputs, layout, implementation="tree", **options):
    return TREE_FUNCTIONS[kind](*inputs, layout, use_qk_l2norm=True, implementation=implementation, **options)


def trajectory(inputs, rows):
    return [x.detach()[torch.from_numpy(rows).cuda()] for x in inputs]


def lone(kind, inputs, chunk_size=64, boundary_rows=(), **options):
    """The same kernels on one trajectory, whose inputs these are."""
    batch = CompactBatch(PrefixTree.from_sequences([np.arange(len(inputs[0]))]), device="cuda")
    return run(kind, inputs, batch.chunk_layout(chunk_size, boundary_rows), **options)


def gradients(kind, inputs, layout, implementation="tree", seed=0):
    """Outputs and gradients, every row's output weighted differently."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    output = run(kind, leaves, layout, implementation).output
    generator = torch.Generator("cuda").manual_seed(seed)
    weights = torch.randn(output.shape, generator=generator, device="cuda").to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, leaves, weights)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tree", TREES)
def test_outputs_and_states_are_bit_identical_to_a_lone_trajectory(kind, tree):
    sequences = TREES[tree]()
    batch, inputs = setting(sequences, kind)
    ends = np.flatnonzero(batch.tree.position_ids % 64 == 63)
    layout = batch.chunk_layout(64, ends.tolist())
    output, states = run(kind, inputs, layout)
    assert states.dtype == torch.float32 and len(states) == len(ends)
    state_of_row = dict(zip(ends.tolist(), states, strict=True))
    for rows in batch.rows:
        boundaries = list(range(63, len(rows), 64))
        alone, alone_states = lone(kind, trajectory(inputs, rows), boundary_rows=boundaries)
        assert torch.equal(output[torch.from_numpy(rows).cuda()], alone)
        for position, state in zip(boundaries, alone_states, strict=True):
            assert torch.equal(state_of_row[rows[position]], state)


@pytest.mark.parametrize("kind", KINDS)
def test_60_rounds_one_after_another(kind):
    """The worst plan of a comb: each sequence ends in a side branch, and the next one starts from its state."""
    sequences = many_levels()
    batch, inputs = setting(sequences, kind)
    forks = [30 + 70 * i for i in range(60)]
    starts = [0, *(p // 64 * 64 for p in forks)]
    rows = [path[start:] for path, start in zip(batch.rows, starts, strict=True)]
    rounds = RoundPlan(
        chunk_size=64,
        rows=np.concatenate(rows),
        cu_seqlens=np.cumsum([0] + [len(r) for r in rows]),
        round=np.arange(61),
        replay=np.array([0] + [p % 64 for p in forks]),
        source=np.arange(-1, 60),
        start=np.array(starts),
    )
    layout = make_chunk_layout(batch.tree, rounds, lambda x: torch.from_numpy(np.ascontiguousarray(x)).cuda())
    worst, best = gradients(kind, inputs, layout), gradients(kind, inputs, batch.chunk_layout())
    assert torch.equal(worst[0], best[0])
    for a, b in zip(worst[1:], best[1:], strict=True):  # sums of branches in another order, in bf16
        assert errors({"x": a}, {"x": b})["x"] < 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_a_lone_trajectory_is_bit_identical_to_the_stock_kernel(kind):
    batch, inputs = setting([ids(np.random.default_rng(6), 1000)], kind)
    packed = load_packed_function(kind)
    q, k, v, g, beta = (x[None] for x in inputs)
    stock, _ = packed(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)
    assert torch.equal(run(kind, inputs, batch.chunk_layout()).output, stock[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_consumer_continues_bit_for_bit(kind):
    """Cut at a chunk boundary, the state handed over: outputs as without the cut, in a tree on either side."""
    rng = np.random.default_rng(7)
    trunk = ids(rng, 320)
    sequences = [np.concatenate([trunk[:p], ids(rng, 90)]) for p in (200, 260, 310)]
    batch, inputs = setting(sequences, kind)
    whole = run(kind, inputs, batch.chunk_layout()).output
    cut = 128
    producer = CompactBatch(PrefixTree.from_sequences([trunk[:cut]]), device="cuda")
    consumer = CompactBatch(PrefixTree.from_sequences([s[cut:] for s in sequences]), device="cuda")
    shared = torch.from_numpy(batch.rows[0][:cut]).cuda()
    rows = torch.empty(consumer.num_rows, dtype=torch.int64, device="cuda")
    for own, full in zip(consumer.rows, batch.rows, strict=True):
        rows[torch.from_numpy(own).cuda()] = torch.from_numpy(full[cut:]).cuda()
    _, states = run(kind, [x[shared] for x in inputs], producer.chunk_layout(64, [cut - 1]))
    after = run(kind, [x[rows] for x in inputs], consumer.chunk_layout(), initial_states=states).output
    assert torch.equal(after, whole[rows])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decay", ["none", "mixed", "fast"])
def test_gradient_error_is_that_of_the_expanded_stock_kernel(kind, decay):
    """At most 1.1 times its error against the twin in fp64.

    Where stock Gated DeltaNet cannot train (Hopper with Triton 3.4 to 3.7.0), stock KDA with the head's decay in every
    channel stands in: the same function.
    """
    sequences = SHAPES["fork at 129"] + SHAPES["star"] + TREES["random"]()
    batch, inputs = setting(sequences, kind, decay=decay)
    layout, expanded = batch.chunk_layout(), Expanded(batch.tree, 8, HEADS[1], DIMS[1])
    twin = functools.partial(TREE_FUNCTIONS[kind], layout=layout, use_qk_l2norm=True, implementation="torch")
    expected = expanded.results(lambda *x: twin(*x).output, [x.double() for x in inputs], is_tree=True)

    version = Version(importlib.metadata.version("triton"))
    broken = torch.cuda.get_device_capability()[0] == 9 and Version("3.4.0") <= version < Version("3.7.1")
    packed = load_packed_function("kda" if broken else kind)

    def stock(q, k, v, g, beta):
        if broken and kind == "gated_delta_rule":
            g = g[..., None].expand(*g.shape, q.shape[-1])
        return packed(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    baseline = errors(expanded.results(stock, inputs, is_tree=False), expected)
    actual = expanded.results(lambda *x: run(kind, x, layout).output, inputs, is_tree=True)
    for name, error in errors(actual, expected).items():
        assert error <= 1.1 * baseline[name] + 1e-6, (name, error, baseline[name])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [16384, 16385, 17000, 40000])
@pytest.mark.parametrize("decay", ["none", "fast"])
def test_long_sequences_stay_finite_and_repeat(kind, length, decay):
    rng = np.random.default_rng(9)
    trunk = ids(rng, length)
    sequences = [trunk, np.concatenate([trunk[: length // 2], ids(rng, 100)])]
    batch, inputs = setting(sequences, kind, heads=(1, 2), decay=decay)
    first, second = (gradients(kind, inputs, batch.chunk_layout()) for _ in range(2))
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert torch.isfinite(a).all(), name
        assert torch.equal(a, b), name


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_write_nothing_stay_finite(kind):
    """beta = 0 and zero keys and values: nothing is written, no output, no NaN in gradients."""
    batch, inputs = setting(SHAPES["star"], kind)
    inputs = [inputs[0], *(torch.zeros_like(x) for x in inputs[1:])]
    results = gradients(kind, inputs, batch.chunk_layout())
    assert not results[0].any()
    assert all(torch.isfinite(x).all() for x in results)


@pytest.mark.parametrize("kind", KINDS)
def test_70000_branches_of_one_token(kind):
    trunk = np.arange(2, 39)
    sequences = [np.append(trunk, 100 + i) for i in range(70_000)]
    batch, inputs = setting(sequences, kind, heads=(1, 1))
    layout = batch.chunk_layout()
    first, second = (gradients(kind, inputs, layout) for _ in range(2))
    for name, a, b in zip(NAMES, first, second, strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b), name
    for i in (0, 1, 34_567, 69_999):
        alone = lone(kind, trajectory(inputs, batch.rows[i])).output
        assert torch.equal(first[0][torch.from_numpy(batch.rows[i]).cuda()], alone)


@pytest.mark.parametrize(
    "heads, dims, chunk_size, dtype",
    [
        ((2, 2), (64, 128), 64, torch.bfloat16),
        ((1, 4), (128, 64), 64, torch.bfloat16),
        ((2, 2), (96, 80), 64, torch.bfloat16),
        ((1, 2), (256, 256), 64, torch.bfloat16),
        ((2, 2), (128, 128), 32, torch.bfloat16),
        ((2, 4), (64, 64), 64, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_widths_chunks_and_dtypes(kind, heads, dims, chunk_size, dtype):
    """Against the twin in fp64; a lone trajectory gets the same bits."""
    if chunk_size == 32 and kind == "gated_delta_rule":
        pytest.skip("upstream's Gated DeltaNet has chunks of 64 alone")
    sequences = SHAPES["fork at 129"] + SHAPES["star"]
    batch, inputs = setting(sequences, kind, dtype=dtype, heads=heads, dims=dims)
    layout = batch.chunk_layout(chunk_size)
    actual = gradients(kind, inputs, layout)
    expected = gradients(kind, [x.double() for x in inputs], layout, "torch")
    found = errors(dict(zip(NAMES, actual, strict=True)), dict(zip(NAMES, expected, strict=True)))
    bound = 3e-2 if dtype == torch.bfloat16 else 5e-3  # products in bf16 of 2 ** -8 relative error, or tf32's 2 ** -11
    assert max(found.values()) < bound, found
    for rows in batch.rows[:3]:
        alone = lone(kind, trajectory(inputs, rows), chunk_size).output
        assert torch.equal(actual[0][torch.from_numpy(rows).cuda()], alone)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
def test_gate_in_kernel_and_safe_gate(lower_bound):
    """The gate's formula, its gradients, and upstream's bounded-gate path, against the twin in fp64."""
    batch, inputs = setting(SHAPES["fork at 129"] + SHAPES["star"], "kda")
    generator = torch.Generator().manual_seed(3)
    A_log, dt_bias = torch.randn(HEADS[1], generator=generator), torch.randn(HEADS[1] * DIMS[0], generator=generator)
    results = []
    for dtype, implementation in ((None, "tree"), (torch.float64, "torch")):
        leaves = [x.to(dtype or x.dtype).clone().requires_grad_() for x in (*inputs, A_log.cuda(), dt_bias.cuda())]
        options = {"use_gate_in_kernel": True, "lower_bound": lower_bound, "safe_gate": lower_bound is not None}
        output = run(
            "kda", leaves[:5], batch.chunk_layout(), implementation, A_log=leaves[5], dt_bias=leaves[6], **options
        ).output
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    names = (*NAMES, "A_log", "dt_bias")
    found = errors(*(dict(zip(names, r, strict=True)) for r in results))
    assert max(found.values()) < 3e-2, found


@pytest.mark.parametrize("implementation", ["rounds", "nodewise"])
@pytest.mark.parametrize("kind", KINDS)
def test_comparators_compute_the_same_function(kind, implementation):
    batch, inputs = setting(TREES["random"](), kind)
    expected = run(kind, [x.double() for x in inputs], batch.chunk_layout(), "torch").output
    actual = run(kind, inputs, batch.chunk_layout(), implementation).output
    found = errors({"output": actual}, {"output": expected})["output"]
    tree = errors({"output": run(kind, inputs, batch.chunk_layout()).output}, {"output": expected})["output"]
    assert found <= 1.5 * tree, (found, tree)


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_and_tree_agree_bit_for_bit(kind):
    batch, inputs = setting(SHAPES["star"] + SHAPES["fork at 129"], kind)
    layout = batch.chunk_layout(64, np.flatnonzero(batch.tree.position_ids % 64 == 63).tolist())
    tree, rounds = run(kind, inputs, layout), run(kind, inputs, layout, "rounds")
    assert torch.equal(tree.output, rounds.output) and torch.equal(tree.states, rounds.states)
