"""The whole-model benchmark runs on the CPU, counts what it says, and its variants have one loss."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def benchmarks(monkeypatch):
    """The benchmarks' folder on the import path."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def end_to_end(*options) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / "end_to_end.py"), "--rows", "300", "--layers", "4", *options]
    environment = {name: value for name, value in os.environ.items() if name != "HARTS_ROLLOUTS"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)


def test_end_to_end_on_the_cpu(tmp_path):
    path = tmp_path / "end_to_end.json"
    options = [
        "--tokens",
        "1600",
        "--expanded-rows",
        "450",
        "--padded-seconds",
        "120",
        "--json",
        str(path),
        "--plot",
        str(tmp_path / "plot.png"),
    ]
    run = end_to_end(*options)
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "plot.png").stat().st_size > 0
    record = json.loads(path.read_text())
    (step,) = record["steps"].values()
    variants = step["variants"]
    with_stock_experts = {"expanded_grouped_mm", "tree_grouped_mm"}
    without_cuda = {"rounds", "rounds_windows", "nodewise"}
    assert (
        set(variants)
        == {"expanded", "expanded_half", "padded", "tree", "tree_windows"} | with_stock_experts | without_cuda
    )
    assert variants["rounds"] == {"skipped": "needs CUDA"}
    assert variants["expanded"]["rows_computed"] == step["expanded_tokens"]
    assert variants["padded"]["rows_computed"] > step["expanded_tokens"]
    for name in ("tree", "tree_windows"):
        entry = variants[name]
        assert entry["rows_computed"] == entry["plan_rows"] < step["expanded_tokens"]
        assert entry["compression"] == pytest.approx(step["expanded_tokens"] / entry["plan_rows"], abs=1e-4)
        assert entry["efficiency"] == pytest.approx(entry["speedup_over_expanded"] / entry["compression"], abs=1e-3)
    assert variants["tree_windows"]["windows"] > 0
    assert variants["tree_windows"]["rows_computed"] < variants["tree"]["rows_computed"]
    for name in set(variants) - without_cuda:
        assert variants[name]["complete"], name
        assert abs(variants[name].get("loss_difference", 0.0)) < 1e-5, name
        assert "tokens/s" in run.stdout


def test_a_later_run_extends_a_record(tmp_path):
    path = tmp_path / "end_to_end.json"
    options = ["--tokens", "600", "--expanded-rows", "300"]
    run = end_to_end(*options, "--variants", "expanded", "--json", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    (before,) = json.loads(path.read_text())["steps"].values()
    run = end_to_end(*options, "--variants", "tree_windows", "--extend", str(path))
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads(path.read_text())
    (step,) = record["steps"].values()
    assert list(step["variants"]) == ["expanded", "tree_windows"]
    assert step["variants"]["expanded"] == before["variants"]["expanded"]
    entry = step["variants"]["tree_windows"]
    rate = before["variants"]["expanded"]["expanded_tokens_per_second"]
    assert entry["speedup_over_expanded"] == pytest.approx(entry["expanded_tokens_per_second"] / rate, abs=1e-3)
    assert abs(entry["loss_difference"]) < 1e-5
    assert "--variants expanded" in record["command"]
    assert len(record["extended_by"]) == 1 and "--variants tree_windows" in record["extended_by"][0]

    run = end_to_end("--tokens", "2400", "--variants", "tree", "--extend", str(path))
    assert run.returncode != 0 and "differ in step" in run.stderr and "expanded_tokens" in run.stderr
    assert json.loads(path.read_text()) == record


def test_a_record_of_other_conditions_is_not_extended(benchmarks):
    from extended_record import CONDITIONS, extend_record

    record = dict.fromkeys(CONDITIONS, 1) | {"command": "first", "steps": {}}
    new = record | {"command": "second"}
    assert extend_record(dict(record), new)["extended_by"] == ["second"]
    for name in CONDITIONS:
        with pytest.raises(ValueError, match=f"differ: {name} 1 and 2"):
            extend_record(dict(record), new | {name: 2})


def test_complete_passes_are_reported(benchmarks):
    """A first pass that ended early does not count where later ones are complete."""
    from types import SimpleNamespace

    from step_entry import entry_of
    from step_run import StepRun
    from step_work import StepWork

    lengths = (4, 6)
    step = SimpleNamespace(
        trajectories=[SimpleNamespace(token_ids=np.zeros(n)) for n in lengths],
        num_tokens=sum(lengths),
        num_scored=8,
        advantages=np.ones(2),
    )
    runner = SimpleNamespace(step=step, loss_of=lambda sums: sum(sums.values()))
    flops = SimpleNamespace(model_flops=lambda work: 0.0, hardware_flops=lambda work: 0.0)

    def run(marks, is_complete, log_prob):
        members = [0, 1][: len(marks)]
        sums = dict.fromkeys(members, log_prob)
        return StepRun(marks[-1], marks, is_complete, members, len(marks), 3 * len(marks), StepWork(), sums)

    early, late, later = run([31.0], False, -1.0), run([2.0, 5.0], True, -2.0), run([2.0, 6.0], True, -3.0)
    entry = entry_of(runner, [early, late, later], flops)
    assert entry["complete"] and entry["seconds"] == 5.5 and entry["complete_passes"] == [5.0, 6.0]
    assert entry["spread"] == pytest.approx(0.2)
    assert (entry["expanded_tokens"], entry["rows_computed"], entry["microbatches"]) == (10, 6, 2)
    assert entry["share_of_tokens"] == 1.0 and entry["log_prob_sums"] == {0: -2.0, 1: -2.0}
    entry = entry_of(runner, [early, early], flops)
    assert not entry["complete"] and entry["seconds"] == 31.0 and entry["complete_passes"] == []
    assert entry["share_of_tokens"] == 0.4 and entry["log_prob_sums"] == {0: -1.0}


def test_a_profile_with_windows_holds_a_producer_and_its_consumer(benchmarks):
    from hybrid_model import build_hybrid_model
    from rollout_steps import BUNDLED, load_step
    from step_benchmark import first_part
    from step_variants import StepRunner, tree_forward

    from harts_hf.planning.microbatches import plan_step

    model = build_hybrid_model("cpu", num_layers=2)
    options = {"num_tokens": 1600, "vocab_size": model.config.vocab_size, "max_length": 200, "thin": True}
    runner = StepRunner(model, load_step(BUNDLED, None, **options))
    plan = plan_step(runner.step.sequences, 300, windows=True)
    slots = [microbatch.window for microbatch in plan.microbatches]
    assert first_part(plan) == 1 + next(i for i, window in enumerate(slots) if window is not None)
    assert first_part(plan_step(runner.step.sequences, 300)) == 1
    with tree_forward(model, None, None):
        run = runner.trees(plan, microbatch_limit=first_part(plan))
    own = plan.microbatches[: first_part(plan)]
    producers = {w for m in own if m.window is not None for w in plan.windows_above(m.window)}
    assert producers and run.microbatches == len(own)
    assert run.embedded_rows == sum(m.rows for m in own) + sum(plan.producer_rows[w] for w in producers)


def test_a_wrong_loss_is_noticed(benchmarks):
    from end_to_end_report import derive, wrong_losses

    def entry(log_prob):
        counts = {"expanded_tokens": 4, "rows_computed": 4, "replay_tokens": 0, "expanded_tokens_per_second": 1.0}
        return counts | {"log_prob_sums": {0: log_prob, 1: -3.0}, "loss_weights": [1.0, -1.0]}

    variants = {"expanded": entry(-2.0), "tree": entry(-2.0), "rounds": entry(-2.01)}
    record = {"dtype": "float32", "steps": {"a set": {"variants": variants}}}
    derive(record)
    assert wrong_losses(record) == ["a set rounds: -2.0e-03"]


def test_steps_are_whole_groups(benchmarks):
    from rollout_steps import BUNDLED, load_step

    options = {"num_tokens": 3000, "vocab_size": 5000}
    step = load_step(BUNDLED, None, max_length=100_000, **options)
    again = load_step(BUNDLED, None, max_length=100_000, **options)
    assert len(step.trajectories) == 4 * step.num_groups and step.num_left_out == 0
    assert all(np.array_equal(a, b) for a, b in zip(step.sequences, again.sequences, strict=True))
    assert np.array_equal(step.advantages, again.advantages)
    assert step.num_tokens >= 3000
    shorter = sorted(map(len, step.sequences))[1]
    some = load_step(BUNDLED, None, max_length=shorter, **options)
    assert some.num_left_out > 0 and max(map(len, some.sequences)) <= shorter
    thinned = load_step(BUNDLED, None, max_length=50, thin=True, **options)
    assert thinned.num_left_out == 0 and max(map(len, thinned.sequences)) <= 50


def test_trajectories_are_packed_whole(benchmarks):
    from step_variants import pack

    assert pack([3, 9, 4, 5, 2], 8) == [[1], [3, 0], [2, 4]]


def test_flops_of_a_forward(benchmarks):
    """Against torch's counter: rows, head and, of dense attention, all pairs."""
    from hybrid_model import build_hybrid_model
    from step_work import ForwardFlops
    from torch.utils.flop_counter import FlopCounterMode

    model = build_hybrid_model("cpu", recompute=False).eval()
    model.set_experts_implementation("eager")
    flops = ForwardFlops.of(model)
    tokens = 40
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(tokens)[None], use_cache=False)
    counted = counter.get_flop_counts()
    expected = tokens * (flops.row + flops.scored) + tokens**2 * flops.pair
    linear = [i for i, kind in enumerate(model.config.layer_types) if kind == "linear_attention"]
    in_kernels = sum(  # linear attention and convolutions, which the count leaves out
        counted[f"{type(model).__name__}.model.layers.{i}.self_attn"].get(operator, 0)
        for i in linear
        for operator in (torch.ops.aten.bmm, torch.ops.aten.convolution)
    )
    assert counter.get_total_flops() - in_kernels == expected


def test_kernels_find_their_component(benchmarks):
    from kernel_breakdown import OTHER, component_of

    names = {
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90": "softmax attention",
        "_conv_forward_kernel": "convolution",
        "_rms_norm_forward_kernel": "fused norms, SwiGLU layers and forget gates",
        "_kda_gate_backward_kernel": "fused norms, SwiGLU layers and forget gates",
        "_forward_swiglu_kernel": "experts' SwiGLU",
        "_forward_kernel": "linear attention",
        "chunk_kda_bwd_kernel_wy_dqkg_fused": "linear attention",
        "_sum_gradient_kernel": "gathers and sums of rows, of linear attention and experts",
        "_gradient_kernel": "head, without its GEMMs",
        "cutlass::device_kernel<GemmUniversal<cutlass::gemm::GroupProblemShape": "MoE grouped GEMM",
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NTN": "dense GEMM",
        "cublasLt::splitKreduce_kernel<32, 16>": "dense GEMM",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float": "norms and reductions",
        "at::native::index_elementwise_kernel<128, 4>": "routing and token order",
        "at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda": "copies",
        "Memcpy DtoD (Device -> Device)": "copies",
        "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>": "elementwise",
        "some_kernel": OTHER,
    }  # fmt: skip
    assert {name: component_of(name) for name in names} == names
