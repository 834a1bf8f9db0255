"""On a GPU a branch behind a hand-off has the bits that it has in one microbatch, and a step the same gradients."""

import copy

import numpy as np
import pytest
import torch
from grpo_runs import gradient_error, save_checkpoint, train
from test_tree_forward_gpu import GPU_SIZES, skip_without_a_gated_delta_backward
from tiny_models import TINY, recompute_activations, tiny_model
from window_plans import one_microbatch, random_window_step, run_step, tokens, window_plan

from harts_hf import TreeGRPOTrainer
from harts_hf.batch import CompactBatch
from harts_hf.boundary import Boundary
from harts_hf.execution import Trajectory
from harts_hf.models.linear_attention_seam import chunk_seam
from harts_hf.planning.window_memory import WindowMemory
from harts_hf.tree import PrefixTree
from harts_hf.window_batches import WindowBatches

HEADS, WIDTH = 2, 32
ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))


def on_gpu(test):
    for mark in ON_GPU:
        test = mark(test)
    return test


def layer_inputs(rng, num_rows, device, dtype):
    """q, k, v, g and beta of each row, [1, C, ..]."""
    shape = (1, num_rows, HEADS, WIDTH)
    q, k, v = (torch.from_numpy(rng.standard_normal(shape)).to(device, dtype) for _ in range(3))
    g = torch.from_numpy(-0.05 * rng.random(shape)).to(device, torch.float32)
    return q, k, v, g, torch.from_numpy(rng.random(shape[:3])).to(device, dtype)


def outputs_by_trajectory(inputs, batch, known):
    """The layer's outputs for a batch's own rows, by known row; `known` says which input row each own row is."""
    options = {
        "kind": "kda",
        "harts_batch": batch,
        "harts_layer": 0,
        "use_qk_l2norm_in_kernel": True,
        "harts_safe_gate": False,
        "harts_recomputes": False,
    }
    return chunk_seam(*(x[:, known] for x in inputs), **options)[0][0]


def compare(handoff, device, dtype, equal):
    """Two trajectories in one tree, and in two consumers of one window."""
    rng = np.random.default_rng(handoff)
    trunk = tokens(rng, handoff)
    sequences = [np.concatenate([trunk, tokens(rng, n)]) for n in (90, 41)]
    whole = CompactBatch(PrefixTree.from_sequences(sequences), device=device)
    inputs = layer_inputs(rng, whole.num_rows, device, dtype)
    expected = outputs_by_trajectory(inputs, whole, np.arange(whole.num_rows))

    plan = window_plan(sequences, [([0], 0), ([1], 0)], [(0, handoff, None)])
    trajectories = [Trajectory(s, np.arange(len(s)) > 0) for s in sequences]
    batches = WindowBatches(plan, trajectories, torch.device(device))
    boundary = Boundary(handoff)
    produced = outputs_by_trajectory(inputs, batches.of_producer(0, None, boundary), whole.rows[0][:handoff])
    boundary.close()
    assert equal(produced, expected[whole.rows[0][:handoff]]), f"producer, hand-off {handoff}"
    for i, microbatch in enumerate(plan.microbatches):
        batch = batches.of_microbatch(microbatch, boundary)
        own = whole.rows[i][handoff:]
        assert equal(outputs_by_trajectory(inputs, batch, own), expected[own]), f"consumer {i}, hand-off {handoff}"


def test_outputs_agree_on_the_cpu():
    for handoff in (1, 3, 63, 64, 65, 127, 128, 200):
        compare(handoff, "cpu", torch.float32, lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-6))


def test_a_hand_off_without_its_state_differs():
    """The comparison can fail."""
    with pytest.raises(AssertionError, match="consumer 0"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Boundary, "nearest", lambda *args: None)
        compare(130, "cpu", torch.float32, lambda a, b: torch.allclose(a, b, rtol=1e-5, atol=1e-6))


@on_gpu
@pytest.mark.parametrize("base", [0, 64, 192])
def test_outputs_are_bit_equal_on_the_gpu(base):
    for offset in range(0 if base else 1, 64):
        compare(base + offset, "cuda", torch.bfloat16, torch.equal)


@on_gpu
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("model_type", TINY)
def test_gradients_of_a_step_are_as_close_as_in_one_microbatch(model_type, recompute):
    """fp32, against the CPU: the GPU's kernels round matrix products to TF32, with windows as without."""
    skip_without_a_gated_delta_backward(model_type)
    exact = tiny_model(model_type, **GPU_SIZES.get(model_type, {}))
    for seed, handoff, nested in ((0, 100, None), (1, 37, 90)):
        sequences, plan = random_window_step(np.random.default_rng(seed), handoff, 3, nested)
        truth, _ = run_step(copy.deepcopy(exact), one_microbatch(sequences), sequences)
        scale = sum(g.square().sum() for g in truth.values() if g is not None).sqrt()
        errors = []
        for steps in (plan, one_microbatch(sequences)):
            model = copy.deepcopy(exact).to("cuda")
            if recompute:
                model.train()
                recompute_activations(model)
            found, _ = run_step(model, steps, sequences)
            squares = [(found[name].cpu() - g).square().sum() for name, g in truth.items() if g is not None]
            errors.append((sum(squares).sqrt() / scale).item())
        assert errors[0] <= 1.5 * errors[1] + 1e-6, f"seed {seed}: {errors}"
        assert errors[0] <= 1e-2, f"seed {seed}: {errors}"


@on_gpu
@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True, "offload_producers": True}], ids=str)
def test_training_with_windows_on_the_gpu(tmp_path, options):
    """Three updates with windows inside of windows, and without, from one checkpoint.

    Every token goes to all experts: a GPU's products of two shapes round apart, and a router that chooses would now
    and then choose another expert, after updates too.
    """
    sizes = GPU_SIZES["bailing_hybrid"] | {"num_experts_per_tok": TINY["bailing_hybrid"]["num_local_experts"]}
    checkpoint = save_checkpoint(tmp_path / "model", **sizes)
    options = {"use_cpu": False, "max_steps": 3, "max_tokens_per_microbatch": 50, **options}
    windows = train(TreeGRPOTrainer, checkpoint, tmp_path / "windows", window_cost_rows=0, **options)
    options |= {"sharing_windows": False, "offload_producers": False, "max_tokens_per_microbatch": 4096}
    plain = train(TreeGRPOTrainer, checkpoint, tmp_path / "plain", **options)
    assert windows.logs[0]["tree/windows"] > 0 and plain.logs[0]["tree/windows"] == 0
    assert next(windows.trainer.model.parameters()).device.type == "cuda"
    assert gradient_error(windows, plain) <= 1e-2


@on_gpu
def test_memory_is_flat_over_fifty_steps():
    """Five plans, ten times each: nothing stays behind, and each plan peaks where it did before."""
    model = tiny_model("bailing_hybrid", **GPU_SIZES["bailing_hybrid"]).to("cuda").train()
    recompute_activations(model)
    steps = [random_window_step(np.random.default_rng(seed), 60 + 50 * seed, 4, 70) for seed in range(5)]
    left, peaks = [], []
    for _ in range(10):
        for sequences, plan in steps:
            torch.cuda.reset_peak_memory_stats()
            run_step(model, plan, sequences)
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
            left.append(torch.cuda.memory_allocated())
    assert max(left[5:]) <= left[4], left
    for k in range(5):
        assert max(peaks[5 + k :: 5]) <= 1.01 * peaks[k] + 2**20, peaks[k::5]


@on_gpu
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "llama"])
def test_an_open_window_keeps_the_bytes_that_the_planner_counts(model_type, monkeypatch):
    """Behind the last consumer, when all leaves have gradients and the producer has not run backward.

    Heads are wide enough for FlexAttention: a dense mask of 3000 rows would take more than all that is counted. Bytes
    are those that tensors asked for; `memory_allocated` holds up to a MiB more for each of them that is above one.
    """
    sizes = {**GPU_SIZES.get(model_type, {}), **({"v_head_dim": 16} if model_type == "bailing_hybrid" else {})}
    model = tiny_model(model_type, hidden_size=256, num_hidden_layers=4, **sizes).to("cuda").train()
    recompute_activations(model)
    rng = np.random.default_rng(0)
    trunk = tokens(rng, 3007)  # 63 rows are replayed, the most
    sequences = [np.concatenate([trunk, tokens(rng, n)]) for n in (90, 41)]
    plan = window_plan(sequences, [([0], 0), ([1], 0)], [(0, len(trunk), None)])
    kept = []
    hand_back = Boundary.hand_back

    def bytes_beside_the_model():
        parameters = [x for p in model.parameters() for x in (p, p.grad) if x is not None]
        own = sum(x.untyped_storage().nbytes() for x in (*parameters, *model.buffers()))
        return torch.cuda.memory_stats()["requested_bytes.all.current"] - own

    def count(boundary):
        kept.append(bytes_beside_the_model())
        return hand_back(boundary)

    run_step(model, plan, sequences)  # compiles
    outside = bytes_beside_the_model()
    monkeypatch.setattr(Boundary, "hand_back", count)
    run_step(model, plan, sequences)
    counted = WindowMemory.from_config(model.config, 1, dtype_bytes=4).window_bytes(len(trunk))
    (kept_bytes,) = kept
    assert 0.95 * counted <= kept_bytes - outside <= 1.05 * counted, (kept_bytes - outside, counted)
