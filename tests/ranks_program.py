"""What each rank of `test_ranks.py` runs: `ranks_program.py PROGRAM FOLDER`, started by torchrun."""

import os
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from grpo_runs import Rollouts, gradient_error, metric_errors, save_checkpoint, train
from test_trajectories import StockOnTrajectories, step_wise_trajectories
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from trl import GRPOTrainer

from harts_hf import TreeGRPOTrainer, load_sharded
from harts_hf.distributed.ranks import Ranks
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.trainers import step_planner
from harts_hf.trainers.micro_batches import PlacedTrajectory
from harts_hf.trainers.planned_step import PlannedStep, share_trajectories
from harts_hf.tree import PrefixTree

RANK = int(os.environ.get("RANK", "0"))  # also imported where no rank runs
TOLERANCE = 1e-5  # fp32, relative; twice the stock trainer's own error with other padding where that is more
DDP = {"ddp_backend": "gloo", "ddp_find_unused_parameters": True}


def equals_stock(folder: Path) -> None:
    """Loss types, recomputation, windows and adapters, off policy, on trajectories that the plan moves."""
    from peft import LoraConfig

    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    on_data = {
        **DDP,
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=8)},
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.3,
        "epsilon": 0.01,
    }
    windows = {"max_tokens_per_microbatch": 60}
    aux = {"loss_type": "dapo", "router_aux_loss_coef": 0.1}
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    online = {**DDP, "per_device_train_batch_size": 4, "rollouts": Rollouts(2)}
    cases = {
        "windows, auxiliary loss": (on_data, {**aux, **evaluation()}, windows),
        "one microbatch": (on_data, {"loss_type": "cispo"}, {}),
        "recomputation, entropies": (
            on_data,
            {"loss_type": "bnpo", "gradient_checkpointing": True, "top_entropy_quantile": 0.5},
            {"max_tokens_per_microbatch": 40},
        ),
        "adapters, reference": (on_data, {"loss_type": "grpo", "beta": 0.1, "lora": lora}, windows),
        "generated": (online, {"loss_type": "luspo", "importance_sampling_level": "sequence"}, windows),
        "each rank by itself": (
            on_data,
            aux,
            {"exchange_trajectories": False, "max_tokens_per_microbatch": (60, 10**6)[RANK]},
        ),
    }
    loads = {}
    for name, (base, loss, options) in cases.items():
        base = dict(base)
        rollouts = base.pop("rollouts", None)
        stock_class = GRPOTrainer if rollouts else StockOnTrajectories
        stock = train(stock_class, checkpoint, folder, rollouts, **base, **loss)
        other = train(stock_class, checkpoint, folder, rollouts, **base, **loss, pad_to_multiple_of=64)
        tree = train(TreeGRPOTrainer, checkpoint, folder, rollouts, **base, **loss, **options)
        compare(name, tree, stock, other)
        log = tree.logs[0]
        assert (log["tree/windows"] > 0) == (options.get("max_tokens_per_microbatch", 10**6) <= 60), name
        if options.get("exchange_trajectories", True):
            assert log["tree/exchange_bytes"] > 0, name
            assert log["tree/expanded_tokens"] == whole_step_tokens(base), name
            assert_equal_on_ranks(name, {k: torch.tensor(v) for k, v in log.items() if k.startswith("tree/")})
        assert_equal_on_ranks(name, tree.parameters)
        loads[name] = tree.trainer.accelerator.reduce(tree.trainer.expert_loads)
    # A near tie of two experts may fall the other way after a step of rounding.
    moved, stayed = loads["windows, auxiliary loss"], loads["each rank by itself"]
    assert torch.equal(moved.sum(1), stayed.sum(1)) and (moved - stayed).abs().max() <= 0.01 * moved.sum(1).max()


def evaluation() -> dict:
    """Options that evaluate after each step, on a number of trajectories that the ranks do not divide evenly."""
    data = step_wise_trajectories(num_episodes=5, seed=3)
    return {"eval_dataset": data, "eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


def whole_step_tokens(options: dict) -> int:
    """Tokens of the trajectories of one optimizer step of both ranks."""
    if "trainer_options" in options:  # one block of the dataset: 2 ranks, 2 micro-steps of 4
        return sum(map(len, options["trainer_options"]["train_dataset"]["input_ids"][:16]))
    return 2 * 2 * sum(len(p) + len(c) for p, c, _ in Rollouts(2).trajectories) // 2


def random_plans(folder: Path) -> None:
    """Thirty steps, each with another plan: 0 to 3 microbatches a rank, or those of a random budget.

    Under DDP, and with experts spread over the ranks, whose all-to-alls have to meet in every layer.
    """
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}", first_k_dense_replace=1)
    options = {
        **DDP,
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=16)},
        "max_steps": 30,
        "learning_rate": 0.01,
        "loss_type": "dapo",
        "num_iterations": 3,
    }
    stock = train(StockOnTrajectories, checkpoint, folder, **options)
    for name, load in (("DDP", None), ("experts", partial(load_sharded, checkpoint, fsdp_size=2, ep_size=2))):
        rng = np.random.default_rng(0)
        counts = set()

        def random_plan(
            tree: PrefixTree, max_tokens: int, num_replicas: int, windows: bool, *, rng=rng, counts=counts, **unused
        ) -> StepPlan:
            if rng.random() < 0.5:
                return plan_step(tree, int(rng.integers(20, 300)), num_replicas, windows)
            lengths = rng.permutation([int(rng.integers(1, 4)), int(rng.integers(0, 4))]).tolist()
            counts.add(tuple(lengths))
            return plan_of_lengths(tree, lengths, rng)

        step_planner.plan_step = random_plan
        tree = train(TreeGRPOTrainer, checkpoint, folder, **options, load=load)
        assert isinstance(next(tree.trainer.model.parameters()), DTensor) == (name == "experts")
        assert any(0 in lengths for lengths in counts) and any(set(lengths) == {1, 3} for lengths in counts), counts
        compare(f"random plans, {name}", tree, stock, stock)


def plan_of_lengths(tree: PrefixTree, lengths: list[int], rng: np.random.Generator) -> StepPlan:
    """A plan that gives each rank so many microbatches, if all have trajectories, which are put there at random."""
    owner = rng.integers(0, sum(lengths), tree.num_trajectories)
    columns, first = [], 0
    for length in lengths:
        members = [np.flatnonzero(owner == first + k).tolist() for k in range(length)]
        members = [sorted(m, key=tree.sorted_order.tolist().index) for m in members if m]
        columns.append([Microbatch(tuple(m), rows(tree, m)) for m in members])
        first += length
    num_slots = max(map(len, columns))
    columns = [column + [None] * (num_slots - len(column)) for column in columns]
    return StepPlan(tuple(zip(*columns, strict=True)), tree.num_tokens)


def rows(tree: PrefixTree, members: list[int]) -> int:
    return len({row for i in members for row in tree.rows(i).tolist()})


def sharded(folder: Path) -> None:
    """FSDP2 equals the stock trainer under DDP: windows, recomputation, adapters, random plans."""
    from peft import LoraConfig

    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    options = {
        "ddp_backend": "gloo",
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=8)},
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.3,
        "epsilon": 0.01,
    }
    losses = {
        "auxiliary loss": {"loss_type": "dapo", "router_aux_loss_coef": 0.1, "beta": 0.1},
        "entropies": {"loss_type": "bnpo", "top_entropy_quantile": 0.5, "entropy_coef": 0.1},
        "adapters": {"lora": LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)},
    }
    stock = {}
    for name, loss in losses.items():
        given = {**options, **loss, "ddp_find_unused_parameters": True}
        stock[name] = [train(StockOnTrajectories, checkpoint, folder, **given, pad_to_multiple_of=n) for n in (1, 64)]
    with pytest.raises(ValueError, match="on the CPU it ignores FSDP"):
        train(TreeGRPOTrainer, checkpoint, folder, **options, fsdp=True)
    force_fsdp_on_cpu()
    options["fsdp"] = True
    windows = {"max_tokens_per_microbatch": 60}
    cases = {
        "one microbatch": ("auxiliary loss", {}),
        "windows": ("auxiliary loss", windows),
        "recomputation": ("auxiliary loss", {"max_tokens_per_microbatch": 40, "gradient_checkpointing": True}),
        "entropies": ("entropies", windows),
        "adapters": ("adapters", windows),
    }
    for name, (loss, case) in cases.items():
        tree = train(TreeGRPOTrainer, checkpoint, folder, **options, **losses[loss], **case)
        assert tree.trainer.accelerator.is_fsdp2
        assert all(isinstance(p, DTensor) for p in tree.trainer.model.parameters())
        compare(f"FSDP2, {name}", tree, *stock[loss])


def expert_parallel(folder: Path) -> None:
    """Models that Transformers shards at load time, experts spread over ranks, equal the stock trainer under DDP."""
    size = int(os.environ["WORLD_SIZE"])
    options = {
        "ddp_backend": "gloo",
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=4 * size)},
        "num_iterations": 2,
        "max_steps": 2,
        "learning_rate": 0.3,
        "epsilon": 0.01,
        "loss_type": "dapo",
        "router_aux_loss_coef": 0.1,
        **evaluation(),
    }
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    given = {**options, "ddp_find_unused_parameters": True}
    stock = [train(StockOnTrajectories, checkpoint, folder, **given, pad_to_multiple_of=n) for n in (1, 64)]
    cases = {
        "fsdp": {"max_tokens_per_microbatch": 60},
        "fsdp, ep": {"max_tokens_per_microbatch": 60},
        "fsdp, ep, recomputation": {"max_tokens_per_microbatch": 40, "gradient_checkpointing": True},
    }
    config = DistributedConfig(fsdp_size=size)
    with pytest.raises(NotImplementedError, match="load_sharded"):
        train(
            TreeGRPOTrainer,
            checkpoint,
            folder,
            **options,
            load=partial(AutoModelForCausalLM.from_pretrained, checkpoint, distributed_config=config),
        )
    for name, case in cases.items():
        sizes = {"fsdp_size": size, "ep_size": 2 if "ep" in name else 1}
        tree = train(
            TreeGRPOTrainer, checkpoint, folder, **options, **case, load=partial(load_sharded, checkpoint, **sizes)
        )
        assert isinstance(tree.trainer.model, FSDPModule)
        compare(f"{name} {sizes}", tree, *stock)
        loads = tree.trainer.accelerator.reduce(tree.trainer.expert_loads)  # [L, E]
        top_k = tree.trainer.model.config.num_experts_per_tok
        expected = [top_k * log["tree/expanded_tokens"] for log in tree.logs if "loss" in log][-1]
        assert (loads.sum(1) == expected).all()
    saving = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    tree = train(
        TreeGRPOTrainer, checkpoint, folder, **options, **saving, load=partial(load_sharded, checkpoint, **sizes)
    )
    exported = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-2", dtype=torch.float32)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter, tree.parameters[name]), f"{name} differs in the checkpoint"
    with pytest.raises(NotImplementedError, match="load_sharded"):
        train(
            TreeGRPOTrainer,
            checkpoint,
            folder,
            **options,
            resume=str(folder / "checkpoint-2"),
            load=partial(load_sharded, checkpoint, **sizes),
        )


def checkpoints(folder: Path) -> None:
    """A run that resumes equals one that was not interrupted: DDP, FSDP2 with whole and with sharded checkpoints."""
    runs = dict(checkpoint_runs(folder))
    if RANK == 0:
        start = AutoModelForCausalLM.from_pretrained(runs["FULL_STATE_DICT"]["checkpoint"], dtype=torch.float32)
        torch.save(start.state_dict(), folder / "start.pt")
    for kind, options in runs.items():
        whole = train(TreeGRPOTrainer, **options)
        resumed = train(TreeGRPOTrainer, **options, resume=str(folder / kind / "checkpoint-1"))
        assert resumed.trainer.accelerator.is_fsdp2 == (kind != "DDP") and len(resumed.gradients) == 1
        for name, parameter in whole.parameters.items():
            assert torch.equal(resumed.parameters[name], parameter), f"{kind}: {name} after resuming"
        if RANK == 0:
            torch.save(whole.parameters, folder / f"{kind}.pt")


def resume_on_other_ranks(folder: Path) -> None:
    """What `checkpoints` saved goes on with another number of ranks."""
    start = torch.load(folder / "start.pt")
    for kind, options in checkpoint_runs(folder):
        expected = torch.load(folder / f"{kind}.pt")
        resumed = train(TreeGRPOTrainer, **options, resume=str(folder / kind / "checkpoint-1"))
        assert len(resumed.gradients) == 1
        for name, parameter in expected.items():
            error, moved = (resumed.parameters[name] - parameter).norm(), (parameter - start[name]).norm()
            assert error <= 1e-4 * moved, f"{kind}: {name} differs by {error:.1e}, moved by {moved:.1e}"


def checkpoint_runs(folder: Path) -> Iterator[tuple[str, dict]]:
    """Kind of checkpoint, and options of a run of two steps over 16 trajectories each on any number of ranks."""
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    force_fsdp_on_cpu()
    for kind in ("DDP", "FULL_STATE_DICT", "SHARDED_STATE_DICT"):
        sharding = {"fsdp": True, "fsdp_config": {"state_dict_type": kind}}
        yield (
            kind,
            {
                "checkpoint": checkpoint,
                "output_dir": folder / kind,
                "ddp_backend": "gloo",
                "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=16)},
                "per_device_train_batch_size": 8 // int(os.environ["WORLD_SIZE"]),
                "max_steps": 2,
                "optim": "adamw_torch",
                "adam_epsilon": 1e-3,  # else rounding of near-zero gradients becomes steps of full size
                "max_tokens_per_microbatch": 100,
                "save_strategy": "steps",
                "save_steps": 1,
                **({"ddp_find_unused_parameters": True} if kind == "DDP" else sharding),
            },
        )


def force_fsdp_on_cpu() -> None:
    """Accelerate 1.15 ignores FSDP on the CPU; the states that it sets on a GPU are set here."""
    given = AcceleratorState.__init__

    def patched(self, *args, **kwargs):
        given(self, *args, **kwargs)
        if kwargs.get("fsdp_plugin") is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = kwargs["fsdp_plugin"]

    AcceleratorState.__init__ = patched


def deep_tree(folder: Path) -> None:
    """5,000 trajectories that nest 5,000 deep and 5,000 short ones, half of them on each rank."""
    PartialState(cpu=True)
    rng = np.random.default_rng(RANK)
    chain = np.random.default_rng(9).integers(0, 1000, 5000)
    sequences = [chain[: n + 1] for n in range(RANK, 5000, 2)] + list(rng.integers(0, 1000, (2500, 8)))
    placed = [
        PlacedTrajectory(ids, np.arange(len(ids)) > 0, micro_batch=i % 4, row=i // 4, first_column=-1)
        for i, ids in enumerate(sequences)
    ]
    shapes = [(1250, 4999)] * 4
    ranks = Ranks(torch.device("cpu"))
    start = time.perf_counter()
    shared = share_trajectories(ranks, placed, shapes)
    share_seconds = time.perf_counter() - start
    assert len(shared.trajectories) == 10_000 and shared.homes == [0] * 4 + [1] * 4
    own = [t for t in shared.trajectories if shared.homes[t.micro_batch] == RANK]
    for got, given in zip(own, placed, strict=True):
        assert np.array_equal(got.token_ids, given.token_ids) and np.array_equal(got.scored, given.scored)
        assert (got.micro_batch - 4 * RANK, got.row, got.first_column) == (given.micro_batch, given.row, -1)
    tree = PrefixTree.from_sequences([t.token_ids for t in shared.trajectories])
    others = [t for t in shared.trajectories if shared.homes[t.micro_batch] != RANK]
    # 4 bytes a token; of the header 2 numbers, 2 a micro-batch and 4 a trajectory, of 8 bytes
    assert ranks.received_bytes == 4 * sum(len(t.token_ids) for t in others) + 8 * (2 + 2 * 4 + 4 * len(others))
    assert 0 < ranks.seconds <= share_seconds
    step = PlannedStep(ranks, shared, plan_step(tree, 2048, 2, windows=True))
    start, before = time.perf_counter(), ranks.received_bytes
    inputs = [{"ids": torch.full(shape, 10 * RANK + m), "scale": torch.tensor(0.5)} for m, shape in enumerate(shapes)]
    held = step.share_micro_batches(inputs)
    for g, values in held.items():
        assert values["ids"].dtype == torch.int64 and (values["ids"] == 10 * (g // 4) + g % 4).all()
        assert values["scale"] == 0.5
    known = {g: torch.full(shape, -1.0) for g, shape in step.shapes.items()}
    for microbatch in step.own_plan.microbatches:
        for i in microbatch.trajectories:
            trajectory = step.trajectories[i]
            known[trajectory.micro_batch][trajectory.row, trajectory.scored_columns] = float(RANK)

    def write(g, at_rows, columns, values):
        known[g][at_rows, columns] = values[0]

    step.send_home(1, lambda g, at_rows, columns: known[g][at_rows, columns][None], write)
    move_seconds = time.perf_counter() - start
    executor = np.zeros(10_000, dtype=int)
    for microbatch in step.plan.of_replica(1).microbatches:
        executor[list(microbatch.trajectories)] = 1
    for i, trajectory in enumerate(step.trajectories):
        if shared.homes[trajectory.micro_batch] == RANK:
            assert (known[trajectory.micro_batch][trajectory.row, trajectory.scored_columns] == executor[i]).all()
    megabytes = before / 1e6
    moved = (ranks.received_bytes - before) / 1e6
    print(
        f"rank {RANK}: ids {1000 * share_seconds / megabytes:.1f} ms per MB ({megabytes:.1f} MB), "
        f"micro-batches {1000 * move_seconds / moved:.1f} ms per MB ({moved:.1f} MB)",
        flush=True,
    )


def one_rank_fails(folder: Path) -> None:
    """Rank 1 raises between two collectives; rank 0 must not wait for it for ever."""
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    given = step_planner.plan_step

    def failing_plan(*args, **kwargs):
        if RANK == 1:
            raise ValueError("rank 1 has no plan")
        return given(*args, **kwargs)

    step_planner.plan_step = failing_plan
    train(TreeGRPOTrainer, checkpoint, folder, **DDP, ddp_timeout=20)


def coupled_loss(folder: Path) -> None:
    """On rank 1 the loss couples trajectories: both ranks refuse it, neither waits for the other."""

    class Coupled(TreeGRPOTrainer):
        def _compute_loss(self, model, inputs):
            loss = super()._compute_loss(model, inputs)
            if RANK == 0:
                return loss
            log_probs = self._get_per_token_logps_and_entropies(model, None, None, None)[0]
            return loss + log_probs.mean() ** 2

    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}")
    with pytest.raises(RuntimeError, match="couples trajectories.*Nothing was updated"):
        train(Coupled, checkpoint, folder, **DDP, max_tokens_per_microbatch=60)


def compare(name: str, tree, stock, other, metrics: tuple[str, ...] | None = None) -> None:
    """Print, and hold against the tolerance, the errors of gradients and metrics: all of them, or those named."""

    def metric_error(run) -> float:
        return max(error for key, error in metric_errors(run, stock).items() if metrics is None or key in metrics)

    errors = {
        "gradient": (gradient_error(tree, stock), gradient_error(other, stock)),
        "metric": (metric_error(tree), metric_error(other)),
    }
    log = tree.logs[0]
    text = ", ".join(f"{kind} {error:.1e} (stock {noise:.1e})" for kind, (error, noise) in errors.items())
    print(f"rank {RANK}: {name}: {log['tree/microbatches']:.0f} microbatches: {text}", flush=True)
    for kind, (error, noise) in errors.items():
        assert error <= max(2 * noise, TOLERANCE), (name, kind, error, noise)


def assert_equal_on_ranks(name: str, tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        first = tensor.clone()
        torch.distributed.broadcast(first, src=0)
        assert torch.equal(first, tensor), f"{name}: {key} differs between ranks"


def main(programs: dict) -> None:
    """Run the program that the command line names, and leave."""
    programs[sys.argv[1]](Path(sys.argv[2]))
    torch.distributed.barrier()  # a rank that leaves while the other still communicates aborts it
    sys.stdout.flush()
    os._exit(0)  # threads of torch's own that still run at the interpreter's end abort it now and then


if __name__ == "__main__":
    main(globals())
