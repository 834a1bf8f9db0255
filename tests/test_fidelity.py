"""The fidelity benchmark: its runs agree where they must, what it measures is there, and it runs."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from forests import random_forest
from test_tree_forward import LOG_PROB_TOLERANCE
from tiny_models import VOCAB, tiny_model

from harts_hf import enable_tree_forward
from harts_hf.boundary import Boundary
from harts_hf.execution import ForwardOptions, Trajectory, forward_plan
from harts_hf.layouts import make_chunk_layout
from harts_hf.planning.rounds import plan_rounds
from harts_hf.tree import PrefixTree

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.parametrize("seed", range(20))
def test_filled_chains_begin_at_chunk_starts(seed):
    """Against the definition: rows keep their ancestors, every chain is whole chunks, nothing is replayed."""
    from chunks_at_forks import fill_chains

    forest = PrefixTree.from_sequences(random_forest(np.random.default_rng(seed), VOCAB))
    filled, place = fill_chains(forest, 8)
    is_own = np.zeros(filled.num_rows, dtype=bool)
    is_own[place] = True
    for row, parent in enumerate(forest.parent.tolist()):
        above = filled.parent[place[row]]
        while above >= 0 and not is_own[above]:
            above = filled.parent[above]
        assert above == (place[parent] if parent >= 0 else -1), f"seed {seed}, row {row}"
        starts_chain = parent < 0 or (forest.parent == parent).sum() > 1
        assert not starts_chain or filled.position_ids[place[row]] % 8 == 0
    rows = np.arange(filled.num_rows)
    has_parent = filled.parent >= 0
    assert np.array_equal(filled.position_ids, np.where(has_parent, filled.position_ids[filled.parent] + 1, 0))
    last = rows + 1  # of each subtree, from the parents alone
    for row in rows[::-1]:
        if filled.parent[row] >= 0:
            last[filled.parent[row]] = max(last[filled.parent[row]], last[row])
    assert np.array_equal(filled.subtree_end, last)
    rounds = plan_rounds(filled, 8)
    assert rounds.replay_tokens == 0
    layout = make_chunk_layout(filled, rounds, torch.from_numpy, [filled.num_rows - 1])
    assert layout.boundary_rows == (filled.num_rows - 1,)
    assert layout.sequences.num_roots == (filled.parent < 0).sum()  # the form that runs on a GPU


def chain_log_probs(model, chain, layout, depth, context):
    """Log-probs of the tokens behind a chain's prefix."""
    from handoff_steps import plan_chain

    sequences, plan = plan_chain(chain, layout, depth)
    trajectories = [Trajectory(s, np.arange(len(s)) > chain.cuts[-1]) for s in sequences]
    found, rows = {}, []
    with torch.no_grad(), context:
        for result in forward_plan(model, plan, trajectories, ForwardOptions(), torch.device("cpu")):
            rows.append(result.batch.num_rows)
            for i, trajectory in enumerate(result.microbatch.trajectories):
                at = result.batch.scores(i)[chain.cuts[-1] + 1 :]
                found[trajectory] = result.output.log_probs[torch.from_numpy(at)]
    assert rows == [m.rows for m in plan.microbatches]
    return torch.cat([found[0], found[1]])


@pytest.mark.parametrize("layout", ["windows", "forks"])
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_next"])
def test_without_replay_is_the_same_but_for_rounding(model_type, layout):
    from chunks_at_forks import without_replay
    from handoff_steps import make_chains

    model = enable_tree_forward(tiny_model(model_type))
    (chain,) = make_chains(1, 3, 70, 20, VOCAB, seed=0)
    alone = chain_log_probs(model, chain, layout, 0, contextlib.nullcontext())
    for depth in range(1, 4):
        replayed = chain_log_probs(model, chain, layout, depth, contextlib.nullcontext())
        restarted = chain_log_probs(model, chain, layout, depth, without_replay(model))
        assert (replayed - alone).abs().max() <= LOG_PROB_TOLERANCE
        assert (restarted - alone).abs().max() <= LOG_PROB_TOLERANCE
        assert not torch.equal(replayed, restarted), "chunks did not move"
        again = chain_log_probs(model, chain, layout, depth, contextlib.nullcontext())
        assert torch.equal(replayed, again), "the context left something behind"


def test_a_lost_state_is_found(monkeypatch):
    from chunks_at_forks import without_replay
    from handoff_steps import make_chains

    model = enable_tree_forward(tiny_model("bailing_hybrid"))
    (chain,) = make_chains(1, 2, 70, 20, VOCAB, seed=0)
    alone = chain_log_probs(model, chain, "windows", 0, contextlib.nullcontext())
    original = Boundary.nearest
    monkeypatch.setattr(Boundary, "nearest", lambda *args: None if args[2] == "state" else original(*args))
    lost = chain_log_probs(model, chain, "windows", 2, without_replay(model))
    assert (lost - alone).abs().max() > 10 * LOG_PROB_TOLERANCE


def test_distributions_against_the_definition():
    from distribution_statistics import compare_distributions, compare_experts

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(37, 8, generator=generator)
    hidden, other = (torch.randn(5, 8, generator=generator) for _ in range(2))
    other[0] = hidden[0]
    hidden[1] = other[1] = 0
    targets = torch.randint(0, 37, (5,), generator=generator)
    found = compare_distributions(hidden, other, weight, targets)
    a, b = ((x.double() @ weight.double().t()) for x in (hidden, other))
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    kl = (torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1)) / 2
    kl += (torch.nn.functional.kl_div(p, q, log_target=True, reduction="none").sum(-1)) / 2
    nll = (p - q).gather(1, targets[:, None]).abs()
    cosine = torch.nn.functional.cosine_similarity(a, b)
    cosine[1] = 1.0  # both 0
    expected = {"symmetric_kl": kl, "nll_difference": nll}
    for name, values in expected.items():
        assert found[f"{name}_mean"] == pytest.approx(values.mean().item(), rel=1e-5)
        assert found[f"{name}_max"] == pytest.approx(values.max().item(), rel=1e-5)
    assert found["cosine_mean"] == pytest.approx(cosine.mean().item(), abs=1e-6)
    assert found["cosine_min"] == pytest.approx(cosine.min().item(), abs=1e-6)
    assert found["equal_states"] == pytest.approx(0.4)

    experts = torch.tensor([[[0, 1], [2, 3]], [[0, 1], [2, 3]]])
    changed = experts.clone()
    changed[1, 0] = torch.tensor([0, 5])
    assert compare_experts(experts, changed) == {"tokens_with_other_experts": 0.5, "other_choices": 0.25}


def test_samples_and_groups_of_gradients(monkeypatch):
    import gradient_samples
    from gradient_samples import GROUPS, GradientSamples, compare_gradients, group_of

    monkeypatch.setattr(gradient_samples, "LARGE", 300)
    model = tiny_model("bailing_hybrid")
    ids = torch.arange(2, 40)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    expected = {name: p.grad.flatten() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with GradientSamples(model) as samples:
        for _ in range(2):
            model(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad is None for p in model.parameters())
    assert samples.sums.keys() == expected.keys()
    for name, gradient in expected.items():
        kept = gradient[:: gradient_samples.STRIDE] if len(gradient) > 300 else gradient
        assert torch.equal(samples.sums[name], 2 * kept), name
    layer_types = model.config.layer_types
    assert {group_of(name, layer_types) for name in expected} == set(GROUPS)

    doubled = {name: 2 * gradient for name, gradient in samples.sums.items()}
    turned = samples.sums | {"lm_head.weight": -samples.sums["lm_head.weight"]}
    for group, values in compare_gradients(doubled, samples.sums, layer_types, torch.device("cpu")).items():
        assert values == pytest.approx({"cosine": 1.0, "relative_difference": 1.0}), group
    found = compare_gradients(turned, samples.sums, layer_types, torch.device("cpu"))
    assert found["head"] == pytest.approx({"cosine": -1.0, "relative_difference": 2.0})
    assert found["experts"] == pytest.approx({"cosine": 1.0, "relative_difference": 0.0})
    with pytest.raises(ValueError, match="lm_head"):
        compare_gradients({}, {"lm_head.weight": doubled["lm_head.weight"]}, layer_types, torch.device("cpu"))


def test_the_benchmark_runs(tmp_path):
    """Both parts on the CPU, in fp32: rounding is all that separates the tree from the stock model."""
    file, picture = tmp_path / "record.json", tmp_path / "picture.png"
    command = [sys.executable, str(BENCHMARKS / "fidelity.py"), "--depths", "0", "2", "--json", str(file)]
    command += ["--plot", str(picture), "--rows", "400", "--fp32"]
    environment = {name: value for name, value in os.environ.items() if name != "HARTS_ROLLOUTS"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    subprocess.run(command, check=True, timeout=300, capture_output=True, env=environment)
    record = json.loads(file.read_text())
    assert picture.stat().st_size > 0 and record["dtype"] == "float32"
    handoffs, microbatch = record["handoffs"]["runs"], record["microbatch"]["runs"]
    names = [f"{layout}, depth 2, {w} replay" for layout in ("windows", "forks") for w in ("with", "without")]
    assert set(handoffs) == {"expanded", "expanded, batches of two", "depth 0", *names}
    assert record["microbatch"]["expanded_tokens"] > record["microbatch"]["rows"]
    for runs in (handoffs, microbatch):
        for name, run in runs.items():
            assert run["against_rerun"]["equal_states"] == 1.0, name
            assert (run["against_fp32"]["equal_states"] == 1.0) == (name == "expanded"), name
            if name != "expanded":
                found = run["against_expanded"]
                assert found["nll_difference_max"] <= LOG_PROB_TOLERANCE and found["symmetric_kl_max"] <= 1e-9, name
                assert found["cosine_min"] >= 1 - 1e-9 and found["tokens_with_other_experts"] == 0, name
    assert all(
        group["relative_difference"] <= 1e-4 for group in microbatch["tree"]["against_expanded"]["gradients"].values()
    )
    replayed, restarted = (handoffs[f"forks, depth 2, {w} replay"]["against_depth_0"] for w in ("with", "without"))
    assert replayed["symmetric_kl_mean"] < restarted["symmetric_kl_mean"]
