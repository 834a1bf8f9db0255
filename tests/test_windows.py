"""A step with sharing windows equals the same step in one microbatch, and the stock model run one by one."""

import contextlib
import gc
import weakref

import numpy as np
import pytest
import torch
from forests import random_forest
from live_bytes import LiveBytes
from test_tree_forward import GRADIENT_TOLERANCE, LOG_PROB_TOLERANCE, expanded_logprobs, worst_gradient
from tiny_models import HYBRIDS, TINY, VOCAB, recompute_activations, tiny_model
from window_plans import gradients_of, one_microbatch, random_window_step, run_step, step_loss, tokens, window_plan

from harts_hf import UnsupportedModelError, disable_tree_forward, enable_tree_forward
from harts_hf.boundary import Boundary
from harts_hf.execution import ForwardOptions, Trajectory, forward_plan
from harts_hf.planning.consumer_tree import consumer_tree
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.window_memory import WindowMemory

SHORT = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


def assert_equals_one_microbatch(model, sequences, plan, context, scored=None):
    actual, log_probs = run_step(model, plan, sequences, scored=scored)
    expected, whole = run_step(model, one_microbatch(sequences), sequences, scored=scored)
    for i, (a, b) in enumerate(zip(log_probs, whole, strict=True)):
        assert len(a) == 0 or (a - b).abs().max() <= LOG_PROB_TOLERANCE, f"{context}: trajectory {i}"
    assert worst_gradient(actual, expected) <= GRADIENT_TOLERANCE, context
    return actual


def expanded_gradients(model, sequences):
    disable_tree_forward(model)
    pairs = zip(*expanded_logprobs(model, sequences), strict=True)
    sum(step_loss(*pair, i) for i, pair in enumerate(pairs)).backward()
    return gradients_of(model)


@pytest.mark.parametrize("nested", [None, 50])
@pytest.mark.parametrize("model_type", TINY)
def test_family_equals_one_microbatch_and_expanded(model_type, nested):
    model = tiny_model(model_type)
    for seed in range(3):
        rng = np.random.default_rng(seed)
        handoff = int(rng.integers(30, 140))
        sequences, plan = random_window_step(rng, handoff, int(rng.integers(2, 7)), nested)
        context = f"{model_type}, seed {seed}, hand-off {handoff}"
        actual = assert_equals_one_microbatch(model, sequences, plan, context)
        assert worst_gradient(actual, expanded_gradients(model, sequences)) <= GRADIENT_TOLERANCE, context


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text"])
@pytest.mark.parametrize("base", [0, 64])
def test_hand_off_at_every_offset_of_a_chunk(model_type, base):
    """Inside of the first conv window, at a chunk's start and end, and everywhere between."""
    model = tiny_model(model_type, **SHORT)
    for offset in range(0 if base else 1, 64):
        rng = np.random.default_rng(offset)
        sequences, plan = random_window_step(rng, base + offset, 2)
        assert_equals_one_microbatch(model, sequences, plan, f"hand-off {base + offset}")


@pytest.mark.parametrize("seed", range(6))
def test_random_windows(seed):
    """One to six consumers; with and without a window inside, of a length around the conv's and the chunk's."""
    model = tiny_model("bailing_hybrid", seed=seed, num_hidden_layers=2)
    rng = np.random.default_rng(100 + seed)
    for case in range(8):
        nested = [None, 1, 2, 3, 62, 64, 65, 130][case]
        handoff, consumers = int(rng.integers(1, 200)), 1 + (case + seed) % 6
        sequences, plan = random_window_step(rng, handoff, consumers, nested)
        assert_equals_one_microbatch(model, sequences, plan, f"seed {seed}, case {case}, hand-off {handoff}")


@pytest.mark.parametrize("seed", range(6))
def test_tokens_that_are_not_scored(seed):
    """A prefix of which nothing is trained, of which one consumer trains what another does not, or its last token."""
    rng = np.random.default_rng(200 + seed)
    handoff = int(rng.integers(2, 130))
    sequences, plan = random_window_step(rng, handoff, 3, [None, 40][seed % 2])
    scored = []
    for sequence in sequences:
        first = [handoff + 1, handoff, int(rng.integers(1, len(sequence) + 1))][seed % 3]
        scored.append((np.arange(len(sequence)) >= first) & (rng.random(len(sequence)) < 0.8))
        scored[-1][0] = False
    model = tiny_model("bailing_hybrid", num_hidden_layers=2)
    assert_equals_one_microbatch(model, sequences, plan, f"seed {seed}", scored=scored)


@pytest.mark.parametrize("model_type", ["kimi_linear", "qwen3_5_text", "llama"])
def test_bf16_is_as_close_to_fp32_as_one_microbatch(model_type):
    """Gradients of six consumers add up in fp32: handing over loses no more than rounding does anyway."""
    exact = tiny_model(model_type, seed=1)
    sequences, plan = random_window_step(np.random.default_rng(12), 100, 6, 60)
    truth, _ = run_step(exact, one_microbatch(sequences), sequences)
    errors = []
    for steps in (plan, one_microbatch(sequences)):
        gradients, _ = run_step(tiny_model(model_type, seed=1).to(torch.bfloat16), steps, sequences)
        squares = [(gradients[name].float() - g).square().sum() for name, g in truth.items() if g is not None]
        errors.append(sum(squares).sqrt())
    assert errors[0] <= 1.25 * errors[1]


def chain_step(rng, cuts=(40, 41, 64, 130, 192), length=230):
    """One long trajectory, its step-wise samples, and a window at each cut inside the one before."""
    long = tokens(rng, length)
    sequences = [long, long[:20], long[:41], long[:150]]
    windows = [(0, cut, k - 1 if k else None) for k, cut in enumerate(cuts)]
    return sequences, window_plan(sequences, [([0, 1, 2, 3], len(cuts) - 1)], windows)


@pytest.mark.parametrize("model_type", [*HYBRIDS, "qwen3"])
def test_chain_of_producers(model_type):
    model = tiny_model(model_type)
    sequences, plan = chain_step(np.random.default_rng(1))
    assert plan.compact_tokens == 230
    actual = assert_equals_one_microbatch(model, sequences, plan, model_type)
    assert worst_gradient(actual, expanded_gradients(model, sequences)) <= GRADIENT_TOLERANCE


@pytest.mark.parametrize("offload_producers", [False, True])
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next", "qwen3_moe", "qwen3", "olmo_hybrid"])
def test_recomputation(model_type, offload_producers):
    model = tiny_model(model_type).train()
    for seed, nested in ((0, None), (1, 70)):
        sequences, plan = random_window_step(np.random.default_rng(seed), 90, 3, nested)
        expected, _ = run_step(model, plan, sequences)
        recompute_activations(model)
        actual, _ = run_step(model, plan, sequences, offload_producers=offload_producers)
        model.gradient_checkpointing_disable()
        for name, gradient in expected.items():
            assert gradient is None or torch.equal(actual[name], gradient), name


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text", "llama"])
def test_a_producer_keeps_its_checkpoints_alone(model_type, monkeypatch):
    """Bytes that autograd saves in producers' forwards, seen from outside of the layers' recomputation."""
    saved = {}

    def count(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    def counting(pin_memory):
        return torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", counting)
    model = tiny_model(model_type).train()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    sequences, plan = random_window_step(np.random.default_rng(0), 190, 2)
    scored = [np.arange(len(s)) > 190 for s in sequences]
    kept = []
    for recomputed in (True, False):
        if recomputed:
            recompute_activations(model)
        run_step(model, plan, sequences, scored=scored, offload_producers=True)
        model.gradient_checkpointing_disable()
        kept.append(sum(size for at, size in saved.items() if at not in parameters))
        saved.clear()
    checkpoint = 190 * model.config.hidden_size * 4
    # One for the input of each layer and one for the final norm's; the embeddings keep the token ids.
    assert kept[0] <= (model.config.num_hidden_layers + 1) * checkpoint + 190 * 8
    assert kept[1] > 3 * kept[0]


def test_reentrant_recomputation_is_refused():
    model = tiny_model("qwen3_next").train()
    sequences, plan = random_window_step(np.random.default_rng(0), 90, 2)
    recompute_activations(model, use_reentrant=True)
    with pytest.raises(UnsupportedModelError, match="use_reentrant=False"):
        run_step(model, plan, sequences)


def test_frozen_layers_and_a_frozen_model():
    """Tensors without a graph are handed over as they are."""
    model = tiny_model("bailing_hybrid")
    sequences, plan = random_window_step(np.random.default_rng(3), 100, 3, 40)
    model.model.embed_tokens.requires_grad_(False)
    model.model.layers[0].requires_grad_(False)
    model.model.layers[1].requires_grad_(False)
    assert_equals_one_microbatch(model, sequences, plan, "frozen")
    model.requires_grad_(False)
    model.lm_head.requires_grad_(True)
    assert_equals_one_microbatch(model, sequences, plan, "head alone")


@pytest.mark.parametrize(
    "name", ["key", "value", "state", "conv_input", "g", "beta", "hidden", "log_probs", "entropies"]
)
def test_a_dropped_boundary_gradient_is_found(name, monkeypatch):
    original = Boundary.put

    def put(self, layer, what, tensor):
        original(self, layer, what, tensor.detach() if what == name else tensor)

    monkeypatch.setattr(Boundary, "put", put)
    model = tiny_model("bailing_hybrid")
    sequences, plan = random_window_step(np.random.default_rng(5), 100, 3)
    with pytest.raises(AssertionError, match="control"):
        assert_equals_one_microbatch(model, sequences, plan, "control")


def test_replay_from_a_wrong_state_is_found(monkeypatch):
    original = Boundary.nearest
    monkeypatch.setattr(Boundary, "nearest", lambda *args: None if args[2] == "state" else original(*args))
    sequences, plan = random_window_step(np.random.default_rng(5), 100, 3)
    with pytest.raises(AssertionError, match="control"):
        assert_equals_one_microbatch(tiny_model("bailing_hybrid"), sequences, plan, "control")


@pytest.mark.parametrize("recomputed", [False, True])
def test_rows_computed_are_those_of_the_plan(recomputed):
    """Counted in the model: where the first layer's forward is called, recomputation aside."""
    model = tiny_model("bailing_hybrid").train()
    if recomputed:
        recompute_activations(model)
    sequences, plan = random_window_step(np.random.default_rng(8), 100, 4, 30)
    seen, results = [], []
    handle = model.model.layers[0].register_forward_hook(lambda _m, args, _o: seen.append(args[0].shape[1]))
    run_step(model, plan, sequences, after=lambda result: results.append(result.microbatch.rows))
    handle.remove()
    assert sum(seen) == plan.compact_tokens and sorted(seen) == sorted(results)
    assert sorted(seen) == sorted([*plan.producer_rows, *(m.rows for m in plan.microbatches)])


def test_expert_loads_count_every_trajectory_once():
    model = tiny_model("qwen3_moe")
    sequences, plan = random_window_step(np.random.default_rng(9), 60, 3, 20)
    loads = {}
    for name, steps in (("windows", plan), ("whole", one_microbatch(sequences))):
        seen = loads.setdefault(name, [])
        run_step(model, steps, sequences, after=lambda result, seen=seen: seen.append(result.output.expert_loads))
    assert torch.equal(sum(loads["windows"]), loads["whole"][0])


@pytest.mark.parametrize("recompute", [False, True])
def test_without_gradients_and_in_one_graph(recompute):
    """`forward_plan` detaches nothing: one backward over all results is that of the step."""
    model = enable_tree_forward(tiny_model("bailing_hybrid"))
    if recompute:
        model.train()
        recompute_activations(model)
    sequences, plan = random_window_step(np.random.default_rng(4), 90, 3, 40)
    trajectories = [Trajectory(s, np.arange(len(s)) > 0) for s in sequences]
    expected, log_probs = run_step(model, plan, sequences)
    total = 0.0
    for result in forward_plan(model, plan, trajectories, ForwardOptions(), torch.device("cpu")):
        for i, trajectory in enumerate(result.microbatch.trajectories):
            at = torch.from_numpy(result.batch.scores(i)[1:])
            assert torch.equal(result.output.log_probs[at].detach(), log_probs[trajectory])
            total = total + step_loss(result.output.log_probs[at], result.output.entropies[at], trajectory)
    total.backward()
    assert worst_gradient(gradients_of(model), expected) <= GRADIENT_TOLERANCE
    with torch.no_grad():
        for result in forward_plan(model, plan, trajectories, ForwardOptions(), torch.device("cpu")):
            assert not result.output.log_probs.requires_grad


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_an_exception_in_a_consumer_frees_all_boundaries(fail_at, monkeypatch):
    alive = weakref.WeakSet()
    original = Boundary.put

    def put(self, layer, name, tensor):
        alive.add(self)
        original(self, layer, name, tensor)

    monkeypatch.setattr(Boundary, "put", put)
    model = tiny_model("bailing_hybrid")
    sequences, plan = random_window_step(np.random.default_rng(2), 90, 3, 40)
    calls = []

    def loss(result):
        calls.append(None)
        if len(calls) > fail_at:
            raise MemoryError("out of memory")
        return result.output.log_probs.sum()

    with pytest.raises(MemoryError):
        run_step(model, plan, sequences, loss=loss)
    assert all(not boundary._given and not boundary._tensors for boundary in alive)
    model.zero_grad()
    assert_equals_one_microbatch(model, sequences, plan, "after the failure")


@contextlib.contextmanager
def without_collector():
    """Reference cycles stay, those from before are gone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_nothing_of_a_window_outlives_it(monkeypatch):
    """Leaves and the producer's graph are gone after the step, without a pass of the garbage collector."""
    tensors = []
    original = Boundary.put

    def put(self, layer, name, tensor):
        original(self, layer, name, tensor)
        tensors.extend(weakref.ref(x) for held in (self._given, self._tensors) for x in held.values())

    monkeypatch.setattr(Boundary, "put", put)
    model = tiny_model("bailing_hybrid")
    sequences, plan = random_window_step(np.random.default_rng(2), 90, 3, 40)
    with without_collector():
        run_step(model, plan, sequences)
        assert tensors and all(reference() is None for reference in tensors)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_step_leaves_no_tensors_to_the_cycle_collector(recompute):
    """What is in a reference cycle would stay on the device until Python looks for cycles, and add to the peak."""
    model = tiny_model("bailing_hybrid").train()
    if recompute:
        recompute_activations(model)
    sequences, plan = random_window_step(np.random.default_rng(0), 100, 3, 50)
    run_step(model, plan, sequences)

    def live_tensors():
        return sum(type(x) in (torch.Tensor, torch.nn.Parameter) for x in gc.get_objects())

    with without_collector():
        before = live_tensors()
        run_step(model, plan, sequences)
        assert live_tensors() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_an_open_window_keeps_the_bytes_that_the_planner_counts(model_type, dtype, monkeypatch):
    """All tensors that are alive behind the last consumer, when the producer has not run backward.

    The count takes the most rows that a consumer may replay, which here are replayed.
    """
    model = tiny_model(model_type, hidden_size=64).to(dtype).train()
    recompute_activations(model)
    enable_tree_forward(model, attention="varlen")  # without a dense mask
    counted = WindowMemory.from_config(model.config, 0, dtype_bytes=dtype.itemsize).window_bytes(447)
    assert 0.97 * counted <= open_window_bytes(model, 447, monkeypatch) <= 1.03 * counted


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text", "llama"])
def test_an_offloaded_producer_keeps_the_bytes_that_the_planner_counts(model_type, monkeypatch):
    """What autograd saves is put into arrays, which are not counted."""

    def in_arrays(pin_memory):
        return torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().numpy().copy(), torch.from_numpy)

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", in_arrays)
    model = tiny_model(model_type, hidden_size=64).train()
    recompute_activations(model)
    enable_tree_forward(model, attention="varlen")
    counted = WindowMemory.from_config(model.config, 0, dtype_bytes=4, checkpoints=False).window_bytes(447)
    kept = open_window_bytes(model, 447, monkeypatch, offload_producers=True)
    assert 0.95 * counted <= kept <= 1.05 * counted


def open_window_bytes(model, handoff, monkeypatch, **options):
    """Bytes that are alive, without the model's own, just before the one window of a step closes."""
    trunk = tokens(np.random.default_rng(0), handoff)
    sequences = [np.append(trunk, [k, k]) for k in (5, 6)]
    plan = window_plan(sequences, [([0], 0), ([1], 0)], [(0, handoff, None)])
    alive, kept = LiveBytes(), []
    hand_back = Boundary.hand_back

    def count(boundary):
        kept.append(alive.count(model))
        return hand_back(boundary)

    monkeypatch.setattr(Boundary, "hand_back", count)
    with alive:
        run_step(model, plan, sequences, **options)
    (kept_bytes,) = kept
    return kept_bytes


@pytest.mark.parametrize("seed", range(12))
def test_planned_steps(seed):
    """Plans of the planner, at a budget below the longest trajectory: windows between microbatches, chains within."""
    rng = np.random.default_rng(seed)
    sequences = random_forest(rng, VOCAB, max_tokens=220, max_trajectories=12)
    max_tokens = max(2, max(map(len, sequences)) // int(rng.integers(1, 5)))
    plan = plan_step(sequences, max_tokens, windows=True)
    assert max(m.rows for m in plan.microbatches) <= max_tokens and max(plan.producer_rows, default=0) <= max_tokens
    assert_equals_one_microbatch(tiny_model("bailing_hybrid", **SHORT), sequences, plan, f"seed {seed}, {max_tokens}")


@pytest.mark.parametrize("seed", range(40))
def test_consumer_tree_holds_each_prefix_once(seed):
    """Against the definition, for trajectories that go on, end inside, part before or start elsewhere."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, 2, int(rng.integers(1, 8)))
    sequences = [np.concatenate([prefix, rng.integers(0, 3, int(rng.integers(1, 6)))])]
    sequences += [rng.integers(0, 2, int(rng.integers(1, 12))) for _ in range(8)] + [prefix[:1], prefix]
    tree = consumer_tree(sequences, prefix)
    for sequence, rows in zip(sequences, tree.all_rows(), strict=True):
        assert np.array_equal(tree.token_ids[rows], sequence)
        assert np.array_equal(tree.position_ids[rows], np.arange(len(sequence)))
        assert np.array_equal(tree.parent[rows], np.append(-1, rows[:-1]))
    on_prefix = {tuple(prefix[: k + 1]) for k in range(len(prefix))}
    own = set()
    for sequence in sequences:
        common = min(len(sequence), len(prefix))
        is_apart = not np.array_equal(sequence[:common], prefix[:common])
        prefixes = {tuple(sequence[: k + 1]) for k in range(len(sequence))}
        own |= {(is_apart, p) for p in (prefixes if is_apart else prefixes - on_prefix)}
    assert tree.num_rows - tree.prefix_rows == len(own)
    is_ancestor = np.zeros((tree.num_rows, tree.num_rows), dtype=bool)
    for row in range(tree.num_rows):
        above = row
        while above >= 0:
            is_ancestor[above, row] = True
            above = tree.parent[above]
    rows = np.arange(tree.num_rows)
    assert np.array_equal(is_ancestor, (rows[:, None] <= rows) & (rows < tree.subtree_end[:, None]))
    counts = np.zeros(tree.num_rows, dtype=int)
    for rows in tree.all_rows():
        counts[rows] += 1
    assert np.array_equal(counts, tree.counts)


def test_a_consumer_needs_a_row_of_its_own():
    prefix = np.arange(5)
    with pytest.raises(ValueError, match="goes on"):
        consumer_tree([prefix, prefix[:3], np.array([7, 8])], prefix)
