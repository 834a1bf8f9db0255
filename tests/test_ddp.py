"""Data parallel training: two ranks with plans of different length give the stock trainer's gradients."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.multi
def test_two_ranks_equal_stock(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
    command += [str(Path(__file__).parent / "ddp_program.py"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "rank 0: " in result.stdout and "rank 1: 1 microbatches" in result.stdout.replace("1.0", "1")
