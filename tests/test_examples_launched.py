"""The example under a launch configuration of `examples/accelerate/`, with two processes on the CPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from grpo_runs import save_checkpoint, train
from test_trajectories import step_wise_trajectories
from transformers import AutoModelForCausalLM

from harts_hf import TreeGRPOTrainer

ROOT = Path(__file__).resolve().parents[1]


def launch(configuration: str, folder: Path, *options: str) -> subprocess.CompletedProcess:
    """The README's command with a tiny model, on the CPU."""
    save_checkpoint(folder / "model", first_k_dense_replace=1)
    rollouts = folder / "rollouts.jsonl"
    step_wise_trajectories(num_episodes=4).to_json(rollouts)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "accelerate.commands.launch", f"--main_process_port={port}"]
    command += ["--config_file", str(ROOT / "examples" / "accelerate" / f"{configuration}.yaml"), "--num_processes=2"]
    command += [str(ROOT / "examples" / "train_tree_grpo.py"), "--use-cpu", "--output-dir", str(folder / "out")]
    command += ["--model-name-or-path", str(folder / "model"), "--dataset", str(rollouts), "--max-steps", "1"]
    command += ["--per-device-train-batch-size", "4", "--num-generations", "2", "--max-tokens-per-microbatch", "60"]
    command += ["--bf16", "False", "--report-to", "none", "--logging-steps", "1", "--save-strategy", "no", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)


@pytest.mark.multi
def test_two_processes_with_experts_spread(tmp_path):
    result = launch("fsdp2_ep", tmp_path, "--ep-size", "2")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "per step" in result.stdout and "tokens computed" in result.stdout
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")  # saved whole


def test_fsdp_of_the_launcher_is_not_ignored(tmp_path, monkeypatch):
    """What the launcher sets for FSDP; Accelerate runs without it on the CPU and says nothing."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", "2")
    checkpoint = save_checkpoint(tmp_path / "model")
    with pytest.raises(ValueError, match="FSDP was asked for, but accelerate runs"):
        train(TreeGRPOTrainer, checkpoint, tmp_path)
