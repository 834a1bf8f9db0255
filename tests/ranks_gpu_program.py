"""What the one rank of `test_ranks_gpu.py` runs: DDP and FSDP2 of one rank, against no distribution at all.

Without a GPU, to try the program itself: FSDP2 forced on, gloo.
"""

import os
from pathlib import Path

import torch
from grpo_runs import Run, gradient_error, save_checkpoint, train
from ranks_program import force_fsdp_on_cpu, main
from test_trajectories import step_wise_trajectories
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from harts_hf import TreeGRPOTrainer

HAS_GPU = torch.cuda.is_available()
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK")


def one_gpu(folder: Path) -> None:
    """Two steps with windows and recomputation; gradients within what bf16 costs without distribution."""
    checkpoint = save_checkpoint(folder / "checkpoint", head_dim=32, first_k_dense_replace=1)
    options = {
        "use_cpu": not HAS_GPU,
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=8, with_old=True)},
        "per_device_train_batch_size": 8,
        "max_steps": 2,
        "learning_rate": 0.01,
        "gradient_checkpointing": True,
        "dataloader_pin_memory": False,
        "max_tokens_per_microbatch": 60,
        "window_cost_rows": 0,
    }

    def run(**case) -> Run:
        done = train(TreeGRPOTrainer, checkpoint, folder, **options, **case)
        done.gradients = [{name: g.float().cpu() for name, g in step.items()} for step in done.gradients]
        losses = [log["loss"] for log in done.logs if "loss" in log]
        assert len(losses) == 2 and torch.isfinite(torch.tensor(losses)).all(), losses
        assert all(torch.isfinite(p).all() for p in done.parameters.values())
        assert done.logs[0]["tree/windows"] > 0
        return done

    launched = {name: os.environ.pop(name) for name in LAUNCHED if name in os.environ}
    truth = run()
    alone = {"autocast": run(bf16=True), "model": run(dtype=torch.bfloat16)}
    assert not torch.distributed.is_initialized()
    os.environ.update(launched)

    backend = "nccl" if HAS_GPU else "gloo"
    distributed = {"ddp_backend": backend}
    ddp = {**distributed, "ddp_find_unused_parameters": True}
    force_fsdp_on_cpu()
    cases = {
        "DDP": ("autocast", {**ddp, "bf16": True}),
        "DDP, bf16 model": ("model", {**ddp, "dtype": torch.bfloat16}),
        "FSDP2": ("autocast", {**distributed, "fsdp": True, "bf16": True}),
    }
    for name, (reference, case) in cases.items():
        tree = run(**case)
        assert torch.distributed.get_backend() == backend
        is_ddp = isinstance(tree.trainer.model_wrapped, DistributedDataParallel)
        is_sharded = all(isinstance(p, DTensor) for p in tree.trainer.model.parameters())
        # Accelerate wraps one process on the CPU, and leaves one on a GPU as it is.
        assert is_ddp == (name != "FSDP2" and not HAS_GPU) and is_sharded == (name == "FSDP2"), name
        # The first step starts from equal parameters; later ones have those of other roundings.
        first, plain, exact = (Run(gradients=r.gradients[:1]) for r in (tree, alone[reference], truth))
        error, noise = gradient_error(first, exact), gradient_error(plain, exact)
        loss, expected = tree.logs[0]["loss"], alone[reference].logs[0]["loss"]
        print(f"{name}: gradient {error:.1e} (one process {noise:.1e}), loss {loss} ({expected})", flush=True)
        assert error <= 2 * noise, name
        assert abs(loss - expected) <= 2**-7 * max(abs(expected), 1), name


if __name__ == "__main__":
    main(globals())
