"""On a GPU each backend of tree attention is as exact as attention on every trajectory alone, at flat memory.

python -m pytest tests/test_tree_attention_gpu.py -k flash4
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from test_attention_tiles import sequences_of
from torch.utils.checkpoint import checkpoint

from harts_hf.batch import CompactBatch
from harts_hf.kernels.attention_layout import AttentionLayout
from harts_hf.kernels.tree_attention import tree_attention
from harts_hf.kernels.tree_attention_flash4 import flash4_is_installed
from harts_hf.tree import PrefixTree

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _needs_flash4():
    on_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    return pytest.mark.skipif(
        not (on_hopper and flash4_is_installed()), reason="needs a Hopper GPU and harts_hf[flash4]"
    )


FLASH4 = pytest.param("flash4", marks=_needs_flash4())
BACKENDS = [FLASH4, "flex", "varlen"]
TILED = [FLASH4, "flex"]
MLA, GQA, NARROW = ((4, 4), (192, 128)), ((4, 2), (128, 128)), ((4, 2), (64, 64))  # (H, Hkv), (K, V)
UNUSED = ((6, 6), (96, 96))  # by other tests: nothing is compiled for it yet
# The bound that the backends have to keep, over the error of attention on each trajectory alone.
FACTOR, SLACK = 1.1, 1e-4  # a twentieth of a bf16 rounding, for what is exact in both


def two_level() -> list[np.ndarray]:
    """P -> {A -> {R0, R1}, B -> {R2, R3}}."""
    rng = np.random.default_rng(0)
    prefix, a, b, *leaves = (rng.integers(0, 50, n) for n in (150, 70, 129, 40, 64, 1, 200))
    return [np.concatenate([prefix, *rest]) for rest in zip((a, a, b, b), leaves, strict=True)]


def deep_chain(depth: int = 64, node_rows: int = 20, branch_rows: int = 13) -> list[np.ndarray]:
    """A chain of nodes with a side branch at each."""
    rng = np.random.default_rng(1)
    chain = rng.integers(0, 50, depth * node_rows)
    sides = (rng.integers(50, 99, branch_rows) for _ in range(depth))
    return [np.concatenate([chain[: (i + 1) * node_rows], side]) for i, side in enumerate(sides)]


TREES = {str(rows): sequences_of(rows) for rows in (1, 127, 128, 129, 1025)}
TREES |= {"two-level": two_level(), "64-deep chain": deep_chain()}


class Setting:
    """A tree's inputs, which bf16 holds exactly, as fp32 leaves; and the weights of the loss.

    The output of a row counts in the first trajectory that has it. If it counted in all, the tree would round one sum
    where each trajectory alone rounds its own part, and independent roundings would partly cancel.
    """

    def __init__(self, sequences, heads_and_dims, seed=0):
        (heads, kv_heads), (key_dim, value_dim) = heads_and_dims
        self.batch = CompactBatch(PrefixTree.from_sequences(sequences), device="cuda")
        self.rows = [torch.from_numpy(rows).cuda() for rows in self.batch.rows]
        self.scale = key_dim**-0.5
        generator = torch.Generator("cuda").manual_seed(seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda")

        count = self.batch.num_rows
        sizes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
        self.inputs = [(1.5 * normal(1, h, count, d)).bfloat16().float() for h, d in sizes]
        self.weights, seen = [], torch.zeros(count, 1, 1, dtype=torch.bool, device="cuda")
        for rows in self.rows:
            self.weights.append(normal(len(rows), heads, value_dim) * ~seen[rows])
            seen[rows] = True

    def results(self, attend):
        """Outputs `[S, H, V]` and gradients of a function of (q, k, v) that returns each trajectory's outputs."""
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        outputs = attend(*inputs)
        sum((o.double() * w).sum() for o, w in zip(outputs, self.weights, strict=True)).backward()
        return [torch.cat(outputs).detach(), *(x.grad for x in inputs)]

    def tree(self, implementation, dtype, window=None):
        def attend(q, k, v):
            output = tree_attention(
                *(x.to(dtype) for x in (q, k, v)), self.batch.attention_layout(), scale=self.scale, window=window,
                implementation=implementation,
            )  # fmt: skip
            output = output[0].float()  # what comes back for a shared row is added up in fp32
            return [output[rows] for rows in self.rows]

        return self.results(attend)

    def alone(self, dtype, window=None):
        """Attention of each trajectory: torch's flash or cuDNN kernel in bf16, written out in fp64."""

        def attend(q, k, v):
            groups = q.shape[1] // k.shape[1]
            return [self._one(*(x[:, :, rows].to(dtype) for x in (q, k, v)), groups, window) for rows in self.rows]

        return self.results(attend)

    def _one(self, q, k, v, groups, window):
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        if q.dtype == torch.float64:
            rows = torch.arange(q.shape[2], device="cuda")
            distance = rows[:, None] - rows
            hidden = (distance < 0) | (distance >= (window or len(rows)))
            scores = (self.scale * q @ k.mT).masked_fill(hidden, float("-inf"))
            return (scores.softmax(-1) @ v)[0].transpose(0, 1)
        value_dim = v.shape[-1]
        v = F.pad(v, (0, q.shape[-1] - value_dim))
        if window is None:
            output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        else:
            rows = torch.arange(q.shape[2], device="cuda")
            distance = rows[:, None] - rows
            mask = (distance >= 0) & (distance < window)
            output = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=self.scale)
        return output[0, :, :, :value_dim].transpose(0, 1)


def error(actual, expected):
    """Root mean square over that of what is expected; of what is all but zero, as it is."""
    difference, size = (actual.double() - expected).norm(), expected.norm()
    return (difference / size if size > 1e-9 * expected.numel() ** 0.5 else difference).item()


def check(setting, implementation, window=None):
    """The baseline's gradients are added up over the trajectories in fp32, and then stored in bf16 like the tree's."""
    truth = setting.alone(torch.float64, window)
    baseline = [x.bfloat16() for x in setting.alone(torch.bfloat16, window)]
    actual = setting.tree(implementation, torch.bfloat16, window)
    errors = {}
    for name, a, b, t in zip(("output", "q", "k", "v"), actual, baseline, truth, strict=True):
        errors[name] = error(a, t), error(b, t)
    print(implementation, {name: f"{a:.2e} against {b:.2e}" for name, (a, b) in errors.items()})
    for name, (a, b) in errors.items():
        assert a <= FACTOR * b + SLACK, f"{name}: {a} against {b}"


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("implementation", BACKENDS)
def test_error_is_that_of_trajectories_alone(implementation, tree):
    check(Setting(TREES[tree], MLA), implementation)


@pytest.mark.parametrize("tree", ["129", "1025"])
@pytest.mark.parametrize("implementation", [FLASH4, "varlen"])
def test_error_with_grouped_heads(implementation, tree):
    check(Setting(TREES[tree], GQA), implementation)


@pytest.mark.parametrize("implementation", [FLASH4, "varlen"])
def test_error_with_a_window(implementation):
    check(Setting(TREES["64-deep chain"], NARROW), implementation, window=100)


@pytest.mark.parametrize("tree", ["1", "129", "1025", "64-deep chain"])
def test_flex_equals_trajectories_alone_in_fp32(tree):
    setting = Setting(TREES[tree], NARROW)
    for name, a, t in zip("oqkv", setting.tree("flex", torch.float32), setting.alone(torch.float64), strict=True):
        assert error(a, t) < 1e-5, name


@pytest.mark.parametrize("prefix_rows", [1, 129, 600])
@pytest.mark.parametrize("implementation", BACKENDS)
def test_rows_behind_a_given_prefix(implementation, prefix_rows):
    """Keys and values of the first rows are given: outputs of the others and all gradients, against the whole tree."""
    setting = Setting(TREES["1025"], MLA)
    whole = setting.batch.attention_layout()
    behind = AttentionLayout(whole.subtree_end, whole.position_ids, prefix_rows)
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(1, setting.batch.num_rows, 4, 128, generator=generator, device="cuda")[:, prefix_rows:]
    results = []
    for dtype, layout, first, name in ((torch.float64, whole, 0, "sdpa"), (torch.bfloat16, behind, prefix_rows, None)):
        q, k, v = (x.to(dtype).requires_grad_() for x in setting.inputs)
        output = tree_attention(
            q[:, :, first:], k, v, layout, scale=setting.scale, implementation=name or implementation
        )[:, prefix_rows - first :]
        results.append([output, *torch.autograd.grad((output.to(weight) * weight).sum(), (q, k, v))])
    for name, expected, actual in zip(("output", "q", "k", "v"), *results, strict=True):
        assert error(actual, expected.double()) < 1e-2, name  # bf16: 2 ** -8 a rounding; a dropped prefix gives 1


@pytest.mark.parametrize("implementation", TILED)
def test_a_wrong_tree_is_caught(implementation):
    """Negative control: causal attention over the rows."""
    setting = Setting(TREES["two-level"], MLA)
    truth = setting.alone(torch.float64)
    setting.batch.attention_layout().subtree_end.fill_(setting.batch.num_rows)
    assert error(setting.tree(implementation, torch.bfloat16)[0], truth[0]) > 0.1


def compilations(implementation) -> int:
    if implementation == "flex":
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    return max(len(function.compile_cache.cache) for function in (_flash_attn_fwd, _flash_attn_bwd))


@pytest.mark.parametrize("implementation", TILED)
def test_twenty_trees_compile_twice_at_most_and_leave_no_memory(implementation):
    before, memory = compilations(implementation), []
    for seed in range(20):
        setting = Setting(sequences_of(300 + 97 * seed), UNUSED, seed)
        assert all(torch.isfinite(x).all() for x in setting.tree(implementation, torch.bfloat16))
        del setting
        torch.cuda.synchronize()
        memory.append(torch.cuda.memory_allocated())
    assert 1 <= compilations(implementation) - before <= 2
    assert memory[-1] <= memory[1]


@pytest.mark.parametrize("implementation", TILED)
def test_memory_does_not_grow_with_the_sum_of_path_lengths(implementation):
    """A 64-deep chain with side branches and one chain, of as many rows."""
    branched = deep_chain(64, node_rows=64, branch_rows=64)
    rows = PrefixTree.from_sequences(branched).num_rows
    peaks = []
    for sequences in ([np.arange(rows)], branched):
        setting = Setting(sequences, MLA)
        setting.tree(implementation, torch.bfloat16)  # compiles
        layout = setting.batch.attention_layout()
        layout._tables.clear()
        q, k, v = (x.bfloat16().requires_grad_() for x in setting.inputs)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = tree_attention(q, k, v, layout, scale=setting.scale, implementation=implementation)
        output.backward(torch.ones_like(output))
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert peaks[1] <= 1.02 * peaks[0], peaks


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("implementation", TILED)
def test_recomputation_gives_the_same_and_makes_no_table_anew(implementation, use_reentrant):
    setting = Setting(TREES["1025"], MLA)
    layout = setting.batch.attention_layout()
    expected = setting.tree(implementation, torch.bfloat16)
    tables = {key: id(table) for key, table in layout._tables.items()}

    def attend(q, k, v):
        def run(*inputs):
            return tree_attention(*inputs, layout, scale=setting.scale, implementation=implementation)

        output = checkpoint(run, *(x.bfloat16() for x in (q, k, v)), use_reentrant=use_reentrant)[0].float()
        return [output[rows] for rows in setting.rows]

    for a, e in zip(setting.results(attend), expected, strict=True):
        assert error(a, e.double()) < 1e-3  # flash4 adds up the queries' gradient in any order
    assert {key: id(table) for key, table in layout._tables.items()} == tables
