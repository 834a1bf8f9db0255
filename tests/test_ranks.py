"""Several ranks plan one step together: gradients and metrics are the stock trainer's, and no rank waits for ever."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from harts_hf.trainers.micro_batches import PlacedTrajectory
from harts_hf.trainers.planned_step import share_trajectories

PROGRAMS = Path(__file__).parent


def run_ranks(
    program: str, num_ranks: int, folder: Path, timeout: int = 240, file: str = "ranks_program.py"
) -> subprocess.CompletedProcess:
    """Run one of the programs of a file on several processes of the loopback interface."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}", f"--master-port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.run(
        [*command, str(PROGRAMS / file), program, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def check(result: subprocess.CompletedProcess) -> str:
    """What the ranks printed; their errors where one failed."""
    assert result.returncode == 0, result.stdout + result.stderr
    print(result.stdout)
    return result.stdout


@pytest.mark.multi
def test_two_ranks_equal_stock(tmp_path):
    check(run_ranks("equals_stock", 2, tmp_path))


@pytest.mark.multi
def test_random_plans_finish(tmp_path):
    check(run_ranks("random_plans", 2, tmp_path))


@pytest.mark.multi
def test_fsdp_equals_stock(tmp_path):
    check(run_ranks("sharded", 2, tmp_path))


@pytest.mark.multi
def test_expert_parallel_equals_stock(tmp_path):
    check(run_ranks("expert_parallel", 2, tmp_path))


@pytest.mark.multi
def test_resumes(tmp_path):
    check(run_ranks("checkpoints", 2, tmp_path))
    check(run_ranks("resume_on_other_ranks", 4, tmp_path))


@pytest.mark.multi
def test_exchange_of_a_deep_tree(tmp_path):
    assert "ms per MB" in check(run_ranks("deep_tree", 2, tmp_path))


@pytest.mark.parametrize("token_id", [2**31 + 5, 2**30, -(2**31) - 5, -1])
def test_an_id_of_no_vocabulary_stays_one_on_all_ranks(token_id):
    class TwoAlike:
        size = 2

        def gather(self, tensor):
            return [tensor, tensor]

    ids = np.array([3, token_id, 2**30 - 1, 7])
    given = PlacedTrajectory(ids, np.array([False, True, False, True]), micro_batch=0, row=0, first_column=-1)
    for got in share_trajectories(TwoAlike(), [given], [(1, 3)]).trajectories:
        assert got.token_ids[1] < 0 or got.token_ids[1] >= 2**30 - 1
        assert got.token_ids[[0, 2, 3]].tolist() == [3, 2**30 - 1, 7] and (got.scored == given.scored).all()


@pytest.mark.multi
def test_an_error_on_one_rank_ends_all(tmp_path):
    result = run_ranks("one_rank_fails", 2, tmp_path, timeout=90)
    assert result.returncode != 0
    assert "rank 1 has no plan" in result.stderr


@pytest.mark.multi
def test_a_loss_that_couples_on_one_rank_ends_all(tmp_path):
    check(run_ranks("coupled_loss", 2, tmp_path, timeout=90))
