"""What each rank of `test_ddp.py` runs: the stock and the tree trainer on the same trajectories, under DDP."""

import os
import sys
from pathlib import Path

import torch
from grpo_runs import gradient_error, metric_errors, save_checkpoint, train
from test_trajectories import StockOnTrajectories, step_wise_trajectories

from harts_hf import TreeGRPOTrainer


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    checkpoint = save_checkpoint(folder / f"checkpoint{rank}")
    options = {
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=8)},
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.3,
        "epsilon": 0.01,
        "loss_type": "dapo",
        "router_aux_loss_coef": 0.1,
        "ddp_backend": "gloo",
        "ddp_find_unused_parameters": True,
    }
    stock = train(StockOnTrajectories, checkpoint, folder, **options)
    other = train(StockOnTrajectories, checkpoint, folder, **options, pad_to_multiple_of=64)
    # Ranks split their share differently, so that they run different numbers of microbatches, one with windows.
    tree = train(TreeGRPOTrainer, checkpoint, folder, **options, max_tokens_per_microbatch=60)
    assert torch.distributed.get_world_size() == 2
    errors = {
        "gradient": (gradient_error(tree, stock), gradient_error(other, stock)),
        "metric": (max(metric_errors(tree, stock).values()), max(metric_errors(other, stock).values())),
    }
    print(f"rank {rank}: {tree.logs[0]['tree/microbatches']} microbatches, {errors}", flush=True)
    assert (tree.logs[0]["tree/windows"] > 0) == (rank == 0)
    for name, (error, noise) in errors.items():
        assert error <= max(2 * noise, 1e-5), (name, error, noise)
    for name, parameter in tree.parameters.items():
        first = parameter.clone()
        torch.distributed.broadcast(first, src=0)
        assert torch.equal(first, parameter), f"{name} differs between ranks"
    torch.distributed.barrier()  # a rank that leaves while the other still communicates aborts it
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
