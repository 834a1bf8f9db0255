"""The trainer's code for several ranks on one GPU, in bf16: one rank of NCCL as DDP has it, and FSDP2 around it."""

import pytest
import torch
from test_ranks import check, run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.multi,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_one_rank_on_a_gpu(tmp_path):
    output = check(run_ranks("one_gpu", 1, tmp_path, file="ranks_gpu_program.py"))
    assert "DDP" in output and "FSDP2" in output
