"""A tree forward equals the stock model run trajectory by trajectory.

Compared are log-probs, entropies and the gradient of every parameter.
"""

import copy
import gzip
import importlib
import json
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from forests import random_forest, shapes
from tiny_models import HYBRIDS, TINY, VOCAB, byte_tokenizer, recompute_activations, tiny_model

from harts_hf import (
    DataCollatorWithPrefixTree,
    UnsupportedModelError,
    disable_tree_forward,
    enable_tree_forward,
    tree_logprobs,
)
from harts_hf.batch import CompactBatch
from harts_hf.execution import ForwardOptions, Trajectory, forward_plan
from harts_hf.kernels.conv_layout import ConvLayout
from harts_hf.models.families import FAMILIES
from harts_hf.planning.microbatches import plan_step
from harts_hf.tree import PrefixTree

LOG_PROB_TOLERANCE = 1e-5  # absolute, fp32: a few ulp of logits of about 4
GRADIENT_TOLERANCE = 1e-4  # relative norm, per parameter


def expanded_logprobs(model, sequences, temperature=1.0):
    """The stock model on each trajectory.

    Right padding comes after every token that counts, so a causal model's result is that of each trajectory alone,
    chunk boundaries included.
    """
    width = max(len(s) for s in sequences)
    ids = torch.zeros(len(sequences), width, dtype=torch.long)
    for i, s in enumerate(sequences):
        ids[i, : len(s)] = torch.as_tensor(np.asarray(s))
    ids = ids.to(model.device)
    logits = model(input_ids=ids, use_cache=False).logits.float() / temperature
    log_probs, entropies = [], []
    for i, s in enumerate(sequences):
        distribution = torch.log_softmax(logits[i, : len(s) - 1], dim=-1)
        log_probs.append(distribution.gather(1, ids[i, 1 : len(s), None])[:, 0])
        entropies.append(-(distribution.exp() * distribution).sum(-1))
    return log_probs, entropies


def gradients(model, log_probs, entropies, seed):
    """Gradients of every parameter of a loss that weighs each token of each trajectory differently."""
    generator = torch.Generator().manual_seed(seed)
    loss = 0.0
    for lp, entropy in zip(log_probs, entropies, strict=True):
        loss = loss + (lp * torch.randn(lp.shape, generator=generator)).sum()
        loss = loss + (entropy * torch.randn(entropy.shape, generator=generator)).sum()
    model.zero_grad()
    if torch.is_tensor(loss) and loss.requires_grad:
        loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_equal_to_expanded(model, sequences, seed, context, temperature=1.0, log_prob_tolerance=LOG_PROB_TOLERANCE):
    disable_tree_forward(model)
    expected = expanded_logprobs(model, sequences, temperature)
    expected_gradients = gradients(model, *expected, seed)
    enable_tree_forward(model)
    actual = tree_logprobs(model, sequences, temperature=temperature)
    actual_gradients = gradients(model, *actual, seed)
    for what, tree, stock in (("log-probs", actual[0], expected[0]), ("entropies", actual[1], expected[1])):
        for i, (a, b) in enumerate(zip(tree, stock, strict=True)):
            assert a.shape == (len(sequences[i]) - 1,)
            assert len(a) == 0 or (a - b).abs().max() <= log_prob_tolerance, f"{context}: {what} of trajectory {i}"
    assert worst_gradient(actual_gradients, expected_gradients) <= GRADIENT_TOLERANCE, context


def worst_gradient(actual, expected):
    """Largest relative norm of the difference over the parameters.

    Parameters that the loss does not reach must have no gradient, or 0, on both sides.
    """
    worst = 0.0
    scale = max((g.norm() for g in expected.values() if g is not None), default=torch.ones(()))
    for name, stock in expected.items():
        tree = actual[name]
        if stock is None or tree is None:
            other = tree if stock is None else stock
            assert other is None or other.abs().max() == 0, f"{name} has a gradient on one side only"
            continue
        # Parameters whose gradient is rounding next to the others' are judged against the largest.
        worst = max(worst, ((tree - stock).norm() / stock.norm().clamp(min=1e-4 * scale)).item())
    return worst


@pytest.mark.parametrize("model_type", TINY)
def test_family_equals_expanded(model_type):
    model = tiny_model(model_type)
    rng = np.random.default_rng(1)
    for seed in range(3):
        assert_equal_to_expanded(model, random_forest(rng, VOCAB), seed, f"{model_type}, seed {seed}")


@pytest.mark.parametrize("seed", range(8))
def test_random_forests(seed):
    model = tiny_model("bailing_hybrid", seed=seed, num_hidden_layers=2)
    rng = np.random.default_rng(seed)
    for case in range(25):
        sequences = random_forest(rng, VOCAB, max_tokens=150, max_trajectories=6)
        context = f"seed {seed}, case {case}, lengths {[len(s) for s in sequences]}"
        assert_equal_to_expanded(model, sequences, case, context)


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text"])
def test_shapes(model_type):
    model = tiny_model(model_type)
    for name, sequences in shapes(np.random.default_rng(3), VOCAB):
        assert_equal_to_expanded(model, sequences, 0, name)


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next"])
def test_bundled_rollouts(model_type):
    """Four real trials of a customer-service task, as bytes: they part in the middle of the first turns."""
    model = tiny_model(model_type, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    path = Path(__file__).parent.parent / "examples" / "data" / "tau_bench_airline" / "rollouts.jsonl.gz"
    with gzip.open(path, "rt") as file:
        chats = [json.loads(line)["messages"] for line in file][:4]
    texts = ["".join(message["content"] for message in chat[1:]).encode()[:600] for chat in chats]
    sequences = [np.frombuffer(text, dtype=np.uint8).astype(np.int64) + 2 for text in texts]
    sequences += [sequences[0][:n] for n in (100, 333)]  # step-wise samples of the first
    assert_equal_to_expanded(model, sequences, 0, "tau-bench")


@pytest.mark.skipif("HARTS_ROLLOUTS" not in os.environ, reason="HARTS_ROLLOUTS names no folder of rollouts")
@pytest.mark.parametrize("name", ["toolbench_dfs_tree", "tot_game24_bfs_tree", "hotpotqa_react", "gsm8k_openai"])
def test_rollouts(name):
    """Real search trees and groups, their vocabulary folded into the tiny model's."""
    data = np.load(Path(os.environ["HARTS_ROLLOUTS"]) / f"{name}.npz")
    offsets, tokens = data["offsets"], data["tokens"]
    members = np.flatnonzero(data["group"] == data["group"][0])[:8]
    sequences = [tokens[offsets[i] : offsets[i + 1]][:700] % (VOCAB - 2) + 2 for i in members]
    model = tiny_model("bailing_hybrid", num_hidden_layers=2)
    assert_equal_to_expanded(model, sequences, 0, name)


def test_temperature():
    model = tiny_model("qwen3_next")
    sequences = random_forest(np.random.default_rng(5), VOCAB)
    assert_equal_to_expanded(model, sequences, 0, "temperature", temperature=0.7)
    with pytest.raises(ValueError, match="temperature"):
        tree_logprobs(model, sequences, temperature=0.0)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next", "qwen3_moe"])
def test_gradient_checkpointing(model_type, reentrant):
    sequences = random_forest(np.random.default_rng(7), VOCAB)
    model = enable_tree_forward(tiny_model(model_type)).train()
    expected = gradients(model, *tree_logprobs(model, sequences), 0)
    recompute_activations(model, use_reentrant=reentrant)
    model.enable_input_require_grads()
    actual = gradients(model, *tree_logprobs(model, sequences), 0)
    for name, gradient in expected.items():
        assert torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_perturbing_one_branch_moves_no_other(model_type):
    """Two probes: right behind the fork, where the conv reads, and far before it, where only the state remembers."""
    overrides = {"first_k_dense_replace": 4} if model_type == "bailing_hybrid" else {}
    if model_type == "kimi_linear":
        overrides = {"mlp_layer_types": ["dense"] * 4}
    model = enable_tree_forward(tiny_model(model_type, **overrides))
    rng = np.random.default_rng(11)
    trunk = rng.integers(100, 200, 150)
    branches = [np.concatenate([trunk[:100], [50 + 20 * k], rng.integers(100, 200, 60)]) for k in range(3)]
    early = np.concatenate([trunk[:20], [40], rng.integers(100, 200, 30)])
    sequences = [*branches, early]
    with torch.no_grad():
        before, _ = tree_logprobs(model, sequences)
        for changed, position in ((1, 102), (1, 159), (3, 22), (3, 49)):
            perturbed = [s.copy() for s in sequences]
            perturbed[changed][position] = 210  # inside a branch: no fork moves and the order of rows stays
            after, _ = tree_logprobs(model, perturbed)
            for i, (a, b) in enumerate(zip(after, before, strict=True)):
                same = torch.equal(a, b)
                assert same == (i != changed), f"changing trajectory {changed} at {position} moved trajectory {i}"


def test_shared_rows_are_computed_once():
    model = enable_tree_forward(tiny_model("bailing_hybrid"))
    rng = np.random.default_rng(13)
    trunk = rng.integers(2, VOCAB, 90)
    sequences = [np.concatenate([trunk, rng.integers(2, VOCAB, n)]) for n in (5, 9, 1)]
    seen = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[1]))
    tree_logprobs(model, sequences)
    handle.remove()
    assert seen == [PrefixTree.from_sequences(sequences).num_rows]


def test_forward_plan_keeps_no_result():
    """A microbatch's output is gone before the next one runs: memory is that of one microbatch."""
    model = enable_tree_forward(tiny_model("llama"))
    sequences = [np.arange(2 + 10 * k, 12 + 10 * k) for k in range(3)]
    trajectories = [Trajectory(s, np.arange(len(s)) > 0) for s in sequences]
    plan = plan_step(sequences, max_tokens=10)
    assert len(plan.microbatches) == 3
    results = forward_plan(model, plan, trajectories, ForwardOptions(), torch.device("cpu"))
    for _ in plan.microbatches:
        result = next(results)
        output = weakref.ref(result.output)
        del result
        assert output() is None


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next"])
def test_device_decides_not_what_is_importable(model_type, monkeypatch):
    """Where flash-linear-attention is installed, upstream's functions are Triton kernels, which no CPU can run."""
    model = enable_tree_forward(tiny_model(model_type))
    sequences = random_forest(np.random.default_rng(29), VOCAB)
    expected, _ = tree_logprobs(model, sequences)

    def needs_a_gpu(*args, **kwargs):
        raise RuntimeError("0 active drivers")

    module = importlib.import_module(type(model).__module__)
    for name, function in vars(module).items():
        if hasattr(function, "tree_version"):
            monkeypatch.setattr(getattr(module, name), "original", needs_a_gpu)
    actual, _ = tree_logprobs(model, sequences)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))
    with pytest.raises(RuntimeError, match="drivers"):
        model(torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize(
    "options, is_safe", [({}, True), ({"kda_safe_gate": False}, False), ({"kda_lower_bound": -8.0}, False)]
)
def test_kernels_are_told_of_a_bounded_gate(options, is_safe, monkeypatch):
    """Only where the layers keep log decays within what the kernels' promise says."""
    from harts_hf.models import linear_attention_seam

    calls = []

    def tree_kda(q, k, v, g, *inputs, safe_gate, **others):
        calls.append((safe_gate, g.min().item(), g.max().item()))
        return original(q, k, v, g, *inputs, safe_gate=safe_gate, **others)

    original = linear_attention_seam.tree_kda
    monkeypatch.setitem(linear_attention_seam.TREE_FUNCTIONS, "kda", tree_kda)
    model = enable_tree_forward(tiny_model("bailing_hybrid", **options))
    tree_logprobs(model, [[2, 3, 4], [2, 3, 5]])
    assert not any(safe_gate for safe_gate, *_ in calls)  # fp32
    calls.clear()
    tree_logprobs(model.bfloat16(), [[2, 3, 4], [2, 3, 5]])
    assert len(calls) == 2
    for safe_gate, lowest, highest in calls:
        assert safe_gate == is_safe
        assert not safe_gate or -5 <= lowest <= highest <= 0


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text"])
def test_intermediates_are_kept_where_activations_are_recomputed(model_type, monkeypatch):
    from harts_hf.models import linear_attention_seam

    kind = FAMILIES[model_type].linear_attention
    original, kept = linear_attention_seam.TREE_FUNCTIONS[kind], []

    def watched(*inputs, keep_intermediates, **others):
        kept.append(keep_intermediates)
        return original(*inputs, keep_intermediates=keep_intermediates, **others)

    monkeypatch.setitem(linear_attention_seam.TREE_FUNCTIONS, kind, watched)
    model = enable_tree_forward(tiny_model(model_type))
    recompute_activations(model)
    for training in (False, True):
        kept.clear()
        tree_logprobs(model.train(training), [[2, 3, 4], [2, 3, 5]])
        assert set(kept) == {training}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_gradients_of_projections_keep_their_rows_contiguous(model_type):
    """Channels first, the products of the projections' backwards would run on rows that are not aligned."""
    model = enable_tree_forward(tiny_model(model_type))
    strides = {}

    def watch(name, output):
        def keep(gradient):
            strides[name] = gradient.stride()

        output.register_hook(keep)

    for name, module in model.model.layers.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda _module, _args, output, name=name: watch(name, output))
    log_probs, _ = tree_logprobs(model, [[2, 3, 4, 5, 6], [2, 3, 9]])
    torch.cat(log_probs).sum().backward()
    assert len(strides) > 8
    assert {name: stride for name, stride in strides.items() if stride[-1] != 1} == {}


@pytest.mark.parametrize("broken", ["mask", "conv", "positions", "state"])
def test_negative_controls(broken, monkeypatch):
    """With one mechanism broken on purpose the comparison fails, so it can fail."""
    original_chunks = CompactBatch.chunk_layout

    def conv_layout(self, width):  # the conv reads the rows before it, whatever branch they are on
        rows = torch.arange(self.num_rows)[:, None] + torch.arange(1 - width, 1)[None]
        return ConvLayout(rows.clamp(min=-1))

    def chunk_layout(self, chunk_size=64, boundary_rows=()):  # branches start from nothing
        layout = original_chunks(self, chunk_size, boundary_rows)
        object.__setattr__(layout, "parent", torch.full_like(layout.parent, -1))
        return layout

    original_init = CompactBatch.__init__

    def init(self, *args, **kwargs):
        original_init(self, *args, **kwargs)
        if broken == "positions":
            self.position_ids = torch.arange(self.num_rows)
        if broken == "mask":
            self.attention_layout().subtree_end.fill_(self.num_rows)

    monkeypatch.setattr(CompactBatch, "__init__", init)
    if broken == "conv":
        monkeypatch.setattr(CompactBatch, "conv_layout", conv_layout)
    if broken == "state":
        monkeypatch.setattr(CompactBatch, "chunk_layout", chunk_layout)
    rng = np.random.default_rng(17)
    trunk = rng.integers(2, VOCAB, 100)
    sequences = [np.concatenate([trunk[:n], rng.integers(2, VOCAB, 60)]) for n in (40, 70, 100)]
    with pytest.raises(AssertionError, match="control"):
        assert_equal_to_expanded(tiny_model("bailing_hybrid"), sequences, 0, "control")


def test_unknown_family_and_options_raise():
    from transformers import GPT2Config, GPT2LMHeadModel

    gpt2 = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=16))
    with pytest.raises(UnsupportedModelError, match="gpt2.*bailing_hybrid"):
        enable_tree_forward(gpt2)
    with pytest.raises(TypeError, match="Linear"):
        enable_tree_forward(torch.nn.Linear(1, 1))
    model = tiny_model("llama")
    model.set_attn_implementation("eager")
    with pytest.raises(UnsupportedModelError, match="sdpa"):
        enable_tree_forward(model)
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        enable_tree_forward(
            tiny_model("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
        )
    with pytest.raises(RuntimeError, match="enable_tree_forward"):
        tree_logprobs(tiny_model("llama"), [[1, 2]])
    dropping = enable_tree_forward(tiny_model("llama", attention_dropout=0.1)).train()
    with pytest.raises(UnsupportedModelError, match="attention_dropout is 0.1"):
        tree_logprobs(dropping, [[1, 2, 3]])


def test_implementations_are_chosen_per_instance():
    model = enable_tree_forward(tiny_model("bailing_hybrid", num_hidden_layers=2))
    sequences = random_forest(np.random.default_rng(11), VOCAB, max_tokens=60)
    expected = tree_logprobs(model, sequences)[0]
    enable_tree_forward(model, linear_attention="reference", attention="varlen")
    for actual, default in zip(tree_logprobs(model, sequences)[0], expected, strict=True):
        assert torch.allclose(actual, default, atol=LOG_PROB_TOLERANCE, rtol=0)
    enable_tree_forward(model, linear_attention="rounds")
    enable_tree_forward(model)  # leaves the choice as it is
    with pytest.raises(ValueError, match="'rounds'.*CUDA"):
        tree_logprobs(model, sequences)
    enable_tree_forward(model, linear_attention="torch", attention="flash4")
    with pytest.raises(ValueError, match="flash4"):
        tree_logprobs(model, sequences)
    other = enable_tree_forward(tiny_model("bailing_hybrid", num_hidden_layers=2))
    for instance in (other, enable_tree_forward(disable_tree_forward(model))):
        for actual, default in zip(tree_logprobs(instance, sequences)[0], expected, strict=True):
            assert torch.equal(actual, default)


def test_unknown_implementations_raise():
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="linear_attention must be one of.*'fast'"):
        enable_tree_forward(model, linear_attention="fast")
    with pytest.raises(ValueError, match="attention must be one of.*'fast'"):
        enable_tree_forward(model, attention="fast")
    with pytest.raises(ValueError, match="no such layers"):
        enable_tree_forward(model, linear_attention="torch")


def test_packed_trajectories_run_as_each_alone():
    """A forest without sharing is what sharing is compared with: one call, block-diagonal, nothing replayed."""
    model = tiny_model("bailing_hybrid", num_hidden_layers=2)
    sequences = random_forest(np.random.default_rng(13), VOCAB, max_tokens=150)
    expected = expanded_logprobs(model, sequences)[0]
    batch = CompactBatch(PrefixTree.without_sharing(sequences))
    ends = np.cumsum([len(s) for s in sequences])
    first = np.repeat(ends - [len(s) for s in sequences], [len(s) for s in sequences])
    rows = torch.arange(int(ends[-1]))
    causal_blocks = (rows[None] <= rows[:, None]) & (rows[None] >= torch.from_numpy(first)[:, None])
    assert torch.equal(batch.attention_layout().dense_mask()[0, 0], causal_blocks)
    assert (batch.round_plan().num_rounds, batch.round_plan().replay_tokens) == (1, 0)
    calls = batch.chunk_layout().packed_calls.calls
    assert len(calls) == 1
    assert torch.equal(calls[0].rows, rows)
    with torch.no_grad():
        actual = enable_tree_forward(model)(harts_batch=batch).log_probs
    for i, stock in enumerate(expected):
        assert torch.allclose(actual[batch.scores(i)[1:]], stock, atol=LOG_PROB_TOLERANCE, rtol=0), i


def test_bad_sequences_are_named():
    model = enable_tree_forward(tiny_model("llama", max_position_embeddings=16))
    with pytest.raises(ValueError, match="trajectory 1.*260.*position 2.*vocabulary"):
        tree_logprobs(model, [[1, 2], [3, 4, VOCAB]])
    with pytest.raises(ValueError, match="trajectory 1 has 17 tokens.*16 positions"):
        tree_logprobs(model, [[1, 2], [3] * 17])
    with pytest.raises(ValueError, match="trajectory 1 is empty"):
        tree_logprobs(model, [[1, 2], []])
    with pytest.raises(TypeError, match="trajectory 0.*integers"):
        tree_logprobs(model, [[1.0, 2.0]])


def test_enabling_changes_one_instance_only(tmp_path):
    model, other = tiny_model("bailing_hybrid"), tiny_model("bailing_hybrid")
    ids = torch.randint(2, VOCAB, (1, 70))
    before = model(ids, use_cache=False).logits
    enable_tree_forward(model)
    assert enable_tree_forward(model) is model
    assert torch.equal(model(ids, use_cache=False).logits, before)
    assert torch.equal(other(ids, use_cache=False).logits, before)
    with pytest.raises(RuntimeError):
        tree_logprobs(other, [[1, 2]])

    generated = model.generate(ids[:, :8], max_new_tokens=4, do_sample=False)
    assert torch.equal(generated, other.generate(ids[:, :8], max_new_tokens=4, do_sample=False))

    model.save_pretrained(tmp_path / "enabled")
    other.save_pretrained(tmp_path / "stock")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "enabled" / name).read_bytes() == (tmp_path / "stock" / name).read_bytes(), name
    loaded = enable_tree_forward(type(model).from_pretrained(tmp_path / "enabled"))
    assert torch.equal(loaded(ids, use_cache=False).logits, before)

    sequences = [ids[0].numpy(), ids[0, :33].numpy()]
    expected, _ = tree_logprobs(model, sequences)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.forward.model is twin
        assert all(torch.equal(a, b) for a, b in zip(tree_logprobs(twin, sequences)[0], expected, strict=True))

    disable_tree_forward(model)
    assert "forward" not in model.__dict__
    assert torch.equal(model(ids, use_cache=False).logits, before)
    with pytest.raises(RuntimeError):
        tree_logprobs(model, sequences)
    assert all(torch.equal(a, b) for a, b in zip(tree_logprobs(loaded, sequences)[0], expected, strict=True))


def test_pickled_model_wakes_in_a_process_without_seams(tmp_path):
    """Upstream's functions swallow unknown keywords: without the seams a tree would run as one sequence."""
    model = enable_tree_forward(tiny_model("bailing_hybrid"))
    sequences = random_forest(np.random.default_rng(23), VOCAB)
    expected, _ = tree_logprobs(model, sequences)
    torch.save((model, sequences, expected), tmp_path / "model.pt")
    code = (
        "import sys, torch; from harts_hf import tree_logprobs;"
        "model, sequences, expected = torch.load(sys.argv[1], weights_only=False);"
        "actual, _ = tree_logprobs(model, sequences);"
        "assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "model.pt")], check=True, timeout=120)


def test_collator_trains_like_the_expanded_batch():
    model = tiny_model("qwen3_next")
    rng = np.random.default_rng(19)
    sequences = random_forest(rng, VOCAB, max_trajectories=6)
    masks = [rng.random(len(s)) < 0.4 for s in sequences]
    features = [
        {
            "input_ids": s.tolist(),
            "labels": np.where(m, s, -100).tolist(),
            "advantage": float(i),
            "old": np.zeros(len(s)),
        }
        for i, (s, m) in enumerate(zip(sequences, masks, strict=True))
    ]
    batch = DataCollatorWithPrefixTree()(features)
    assert all(torch.is_tensor(x) for x in batch.values())
    assert batch["input_ids"].shape[1] == PrefixTree.from_sequences(sequences).num_rows
    assert batch["advantage"].tolist() == list(range(len(sequences)))
    assert batch["old"].shape == batch["tree_input_ids"].shape

    log_probs, _ = expanded_logprobs(model, sequences)
    trained = torch.cat([lp[torch.from_numpy(m[1:])] for lp, m in zip(log_probs, masks, strict=True)])
    enable_tree_forward(model)
    loss = model(**batch).loss
    assert (loss - -trained.mean()).abs() < 1e-5
    loss.backward()
    actual = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    (-trained.mean()).backward()
    for name, gradient in actual.items():
        expected = dict(model.named_parameters())[name].grad
        assert (gradient - expected).norm() <= GRADIENT_TOLERANCE * expected.norm().clamp(min=1e-4), name


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next", "qwen3_5_moe_text", "qwen3_moe"])
def test_collated_loss_has_the_auxiliary_loss_of_the_stock_model(model_type):
    """`output_router_logits` in the config adds it in Qwen's models, and in no other; so does a tree forward."""
    model = tiny_model(model_type, output_router_logits=True, router_aux_loss_coef=0.5)
    sequences = random_forest(np.random.default_rng(23), VOCAB, max_trajectories=6)
    width = max(map(len, sequences))
    ids = torch.stack(
        [torch.nn.functional.pad(torch.as_tensor(s), (0, width - len(s)), value=-100) for s in sequences]
    )
    known = ids != -100
    stock = model(input_ids=ids.where(known, 0), attention_mask=known.long(), labels=ids).loss
    expected = torch.autograd.grad(stock, list(model.parameters()), allow_unused=True)
    tree = enable_tree_forward(model)(**DataCollatorWithPrefixTree()([{"input_ids": s} for s in sequences])).loss
    assert (tree - stock).abs() < 1e-5
    actual = torch.autograd.grad(tree, list(model.parameters()), allow_unused=True)
    for (name, _), gradient, reference in zip(model.named_parameters(), actual, expected, strict=True):
        if reference is not None:
            assert (gradient - reference).norm() <= GRADIENT_TOLERANCE * reference.norm().clamp(min=1e-4), name


@pytest.mark.parametrize("field", ["labels", "completion_mask"])
def test_a_plain_trainer_fine_tunes_on_trees(field, tmp_path):
    """`Trainer` with the collator equals `Trainer` on the expanded trajectories, over accumulation steps too."""
    from datasets import Dataset
    from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

    rng = np.random.default_rng(31)
    trunk = rng.integers(2, VOCAB, 40)
    rows = []
    for n in (5, 30, 12, 7, 50, 3):
        ids = np.concatenate([trunk[: int(rng.integers(20, 40))], rng.integers(2, VOCAB, n)])
        mask = np.arange(len(ids)) >= len(ids) - n
        rows.append({"input_ids": ids, "labels": np.where(mask, ids, -100), "completion_mask": mask.astype(int)})

    def train(model, columns, collator):
        args = TrainingArguments(
            tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, max_steps=1, optim="sgd",
            learning_rate=1.0, max_grad_norm=0.0, report_to="none", save_strategy="no", use_cpu=True, seed=0,
            lr_scheduler_type="constant", disable_tqdm=True,
        )  # fmt: skip
        data = Dataset.from_list([{name: row[name] for name in columns} for row in rows])
        trainer = Trainer(model, args, train_dataset=data, eval_dataset=data, data_collator=collator)
        trainer.train()
        return trainer

    tree = enable_tree_forward(tiny_model("bailing_hybrid", num_hidden_layers=2))
    trained = train(tree, ["input_ids", field], DataCollatorWithPrefixTree())
    stock = tiny_model("bailing_hybrid", num_hidden_layers=2)
    tokenizer = byte_tokenizer()
    tokenizer.padding_side = "right"
    expected = train(stock, ["input_ids", "labels"], DataCollatorForSeq2Seq(tokenizer))
    start = dict(tiny_model("bailing_hybrid", num_hidden_layers=2).named_parameters())
    for name, parameter in stock.named_parameters():
        moved = (parameter - start[name]).norm()
        difference = (dict(tree.named_parameters())[name] - parameter).norm()
        assert difference <= 1e-4 * moved.clamp(min=1e-3), name
    assert trained.evaluate()["eval_loss"] > 0 and expected.evaluate()["eval_loss"] > 0


def test_adapters_that_a_tree_cannot_honour():
    from peft import LoKrConfig, LoraConfig, get_peft_model

    head = LoraConfig(target_modules=["lm_head", "q_proj"], lora_dropout=0.0, init_lora_weights=False)
    with pytest.raises(UnsupportedModelError, match="output head"):
        tree_logprobs(enable_tree_forward(get_peft_model(tiny_model("llama"), head)), [[1, 2, 3]])
    for dropout in ({"rank_dropout": 0.5}, {"module_dropout": 0.5}):
        model = get_peft_model(tiny_model("llama"), LoKrConfig(target_modules=["q_proj"], **dropout)).train()
        with pytest.raises(UnsupportedModelError, match=next(iter(dropout))):
            tree_logprobs(enable_tree_forward(model), [[1, 2, 3]])


def test_models_without_a_vocabulary_head():
    from transformers import AutoModel, AutoModelForSequenceClassification

    config = tiny_model("llama").config
    for kind in (AutoModel, AutoModelForSequenceClassification):
        with pytest.raises(UnsupportedModelError, match="no causal LM"):
            enable_tree_forward(kind.from_config(config))


def test_collator_names_bad_features():
    collate = DataCollatorWithPrefixTree()
    with pytest.raises(ValueError, match="at least one"):
        collate([])
    with pytest.raises(ValueError, match="trajectory 1.*non-empty"):
        collate([{"input_ids": [1]}, {"input_ids": []}])
    with pytest.raises(ValueError, match="trajectory 0: completion_mask"):
        collate([{"input_ids": [1, 2], "completion_mask": [0, 1, 1]}])
    with pytest.raises(ValueError, match="trajectory 0: labels must equal"):
        collate([{"input_ids": [1, 2], "labels": [-100, 3]}])
    with pytest.raises(TypeError, match="trajectory 0"):
        collate([{"input_ids": [1.5, 2]}])
    with pytest.raises(ValueError, match="trajectory 0: attention_mask.*without padding"):
        collate([{"input_ids": [1, 2, 0], "attention_mask": [1, 1, 0]}])
    for mask in ([0, 2, 1], [0.0, 0.5, 1.0], [0, -1, 1]):
        with pytest.raises(ValueError, match="trajectory 0: completion_mask must be 0 or 1"):
            collate([{"input_ids": [1, 2, 3], "completion_mask": mask}])
    for other in ({}, {"completion_mask": None}, {"completion_mask": [0, 1], "advantage": 1.0}):
        with pytest.raises(ValueError, match="trajectory 1 has fields.*trajectory 0 has"):
            collate([{"input_ids": [1, 2], "completion_mask": [0, 1]}, {"input_ids": [1, 2], **other}])
    with pytest.raises(ValueError, match="position_ids.*leave them out"):
        collate([{"input_ids": [1, 2, 3], "position_ids": [0, 1, 0]}])


def test_collator_trains_what_labels_and_mask_both_name():
    feature = {"input_ids": [5, 6, 7, 8], "labels": [-100, 6, 7, -100], "completion_mask": [0, 0, 1, 1]}
    assert DataCollatorWithPrefixTree()([feature])["labels"].tolist() == [-100, -100, 7, -100]


def test_collated_ids_are_checked():
    model = enable_tree_forward(tiny_model("llama"))
    longest = model.config.max_position_embeddings
    collate = DataCollatorWithPrefixTree()
    with pytest.raises(ValueError, match="trajectory 1: token id 99999 at position 2"):
        model(**collate([{"input_ids": [1, 2]}, {"input_ids": [1, 2, 99999]}]))
    with pytest.raises(ValueError, match="positions"):
        model(**collate([{"input_ids": [1] * (longest + 1)}]))


def test_config_without_return_dict():
    model = enable_tree_forward(tiny_model("qwen3_next"))
    sequences = [[1, 2, 3], [1, 2, 4]]
    expected, _ = tree_logprobs(model, sequences)
    model.config.return_dict = False
    actual, _ = tree_logprobs(model, sequences)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_trainable_tokens_of_a_tied_head_are_refused():
    peft = pytest.importorskip("peft")
    model = tiny_model("llama", tie_word_embeddings=True)
    adapted = peft.get_peft_model(
        enable_tree_forward(model), peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3])
    )
    with pytest.raises(UnsupportedModelError, match="trainable_token_indices"):
        tree_logprobs(adapted, [[1, 2, 3]])
