"""Every loss on several ranks under each way of sharding, against the stock trainer and against one rank."""

import pytest
import torch
from grpo_runs import save_checkpoint, train
from test_ranks import check, run_ranks

from harts_hf import TreeGRPOTrainer

FILE = "ranks_equal_program.py"


@pytest.mark.multi
def test_every_loss(tmp_path):
    from ranks_equal_program import LOSSES, WITHIN_MICRO_BATCHES, follow_loads, options_of, router_biases

    checkpoint = save_checkpoint(tmp_path / "checkpoint", first_k_dense_replace=1)
    for name in set(LOSSES) - set(WITHIN_MICRO_BATCHES):
        alone = train(TreeGRPOTrainer, checkpoint, tmp_path, **options_of(name, 1), prepare=follow_loads)
        routing = {"loads": alone.trainer.expert_loads, "biases": router_biases(alone.trainer)}
        torch.save({"gradients": alone.gradients, "logs": alone.logs, **routing}, tmp_path / f"{name}.pt")
    check(run_ranks("every_loss", 2, tmp_path, file=FILE))


@pytest.mark.multi
def test_uneven_ranks(tmp_path):
    check(run_ranks("uneven_ranks", 4, tmp_path, file=FILE))


@pytest.mark.multi
def test_bf16(tmp_path):
    from ranks_equal_program import BF16_RUNS, options_of

    checkpoint = save_checkpoint(tmp_path / "checkpoint", first_k_dense_replace=1)
    for name, precision in {"fp32": {}, **BF16_RUNS}.items():
        alone = train(TreeGRPOTrainer, checkpoint, tmp_path, **options_of("dapo", 1), **precision)
        torch.save({"gradients": alone.gradients, "logs": alone.logs}, tmp_path / f"{name}.pt")
    check(run_ranks("bf16", 2, tmp_path, file=FILE))
