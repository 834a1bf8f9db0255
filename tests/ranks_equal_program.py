"""What each rank of `test_ranks_equal.py` runs: every loss, uneven ranks, replicas of shards, bf16."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import ParallelismConfig
from grpo_runs import Run, gradient_error, save_checkpoint, train, whole
from ranks_program import DDP, RANK, assert_equal_on_ranks, compare, force_fsdp_on_cpu, main, plan_of_lengths
from test_trajectories import StockOnTrajectories, step_wise_trajectories
from torch.distributed.tensor import DTensor, Replicate, Shard

from harts_hf import ExpertBiasCallback, TreeGRPOTrainer, load_sharded
from harts_hf.planning.plan import StepPlan
from harts_hf.trainers import grpo_trainer, step_planner

WINDOWS = {"max_tokens_per_microbatch": 60}
BIAS_RATE = 0.25
FILLER_ROWS = 2  # of a microbatch that stands for nothing; the trajectories here have at least 35 tokens
LOSSES = {
    "grpo": {},
    "bnpo": {},
    "dr_grpo": {},
    "dapo": {},
    "cispo": {"epsilon_high": 1.01},
    "sapo": {},
    "luspo": {"importance_sampling_level": "sequence"},
    "vespo": {},
}
# Losses of each way of sharding; `ranks_program.py` has the others under DDP (`equals_stock`), FSDP2 (`sharded`).
LOSSES_OF = {"DDP": ("dr_grpo", "sapo", "vespo"), "FSDP2, EP2": tuple(LOSSES), "FSDP2": ("cispo", "luspo")}
# Normalised within a stock micro-batch, of which one rank has others: not the same loss.
WITHIN_MICRO_BATCHES = ("bnpo",)


def options_of(loss_type: str, num_ranks: int) -> dict:
    """A step of 16 trajectories, whatever the number of ranks, off policy: their old log-probs are given."""
    return {
        "trainer_options": {"train_dataset": step_wise_trajectories(num_episodes=8, with_old=True)},
        "per_device_train_batch_size": 8 // num_ranks,
        "epsilon": 0.01,
        "loss_type": loss_type,
        **LOSSES[loss_type],
    }


def follow_loads(trainer) -> None:
    """For `train(prepare=...)`."""
    trainer.add_callback(ExpertBiasCallback(trainer, BIAS_RATE))


def router_biases(trainer) -> list[torch.Tensor]:
    return [whole(buffer) for name, buffer in trainer.model.named_buffers() if "correction_bias" in name]


def check_biases(name: str, trainer, loads: torch.Tensor, biases: list[torch.Tensor]) -> None:
    """Loads summed over ranks, and biases on each, are those of one rank; some rank's own loads would give others."""
    own = trainer.expert_loads
    assert torch.equal(trainer.accelerator.reduce(own), loads), name
    for found, expected in zip(router_biases(trainer), biases, strict=True):
        assert expected.any() and torch.equal(found, expected), name
    assert trainer.accelerator.reduce((moves(own) != moves(loads)).sum()) > 0, name


def moves(loads: torch.Tensor) -> torch.Tensor:
    """Signs of the changes of biases, of loads `[L, E]`."""
    return torch.sign(loads.mean(1, keepdim=True) - loads)


class MeasuredRows:
    """Counts the rows that the model's embedding sees in each training step, beside the step's plan."""

    def __init__(self):
        self.steps: list[tuple[StepPlan, list[int]]] = []  # plan of all ranks, rows of each forward of this one
        self._plan: StepPlan | None = None
        self._plan_step, self._train_plan = step_planner.plan_step, grpo_trainer.train_plan

    def __enter__(self):
        def plan_step(*args, **kwargs):
            self._plan = self._plan_step(*args, **kwargs)
            return self._plan

        def train_plan(*args, **kwargs):
            self.steps.append((self._plan, []))
            return self._train_plan(*args, **kwargs)

        step_planner.plan_step, grpo_trainer.train_plan = plan_step, train_plan
        return self

    def __exit__(self, *unused):
        step_planner.plan_step, grpo_trainer.train_plan = self._plan_step, self._train_plan

    def watch(self, trainer) -> None:
        """For `train(prepare=...)`."""

        def count(module, inputs):
            if torch.is_grad_enabled() and self.steps:
                self.steps[-1][1].append(inputs[0].numel())

        trainer.model.get_input_embeddings().register_forward_pre_hook(count)

    def check(self, name: str, logs: list[dict]) -> None:
        """Rows per rank and slot are the plan's, and so are their balance and sum, as logged."""
        logs = [log for log in logs if "tree/balance" in log]
        assert len(logs) == len(self.steps) > 0
        for (plan, forwards), log in zip(self.steps, logs, strict=True):
            rows = iter([n for n in forwards if n != FILLER_ROWS])
            slots = []
            for slot, row in enumerate(plan.slots):
                producers = [w for w in plan.windows if w.replica == RANK and w.consumers[0] == slot]
                slots.append(sum(next(rows) for _ in range(len(producers) + (row[RANK] is not None))))
            assert next(rows, None) is None, f"{name}: rank {RANK} ran more than its plan"
            assert slots == [row[RANK] for row in plan.slot_rows], f"{name}: rank {RANK}"
            measured: list = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(measured, slots)
            per_slot = np.array(measured).T
            assert per_slot.sum() == log["tree/rows"]
            assert log["tree/balance"] == pytest.approx((per_slot.mean(1) / per_slot.max(1)).mean())
            assert log["tree/balance_p5"] == pytest.approx(np.percentile(per_slot.mean(1) / per_slot.max(1), 5))


def every_loss(folder: Path) -> None:
    """Losses under DDP, FSDP2 and FSDP2 with experts over ranks: the stock trainer's, and the one-rank run's.

    So are the experts' loads, of all ranks, and the router biases that follow them.
    """
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}", first_k_dense_replace=1)
    force_fsdp_on_cpu()
    given = {name: options_of(name, 2) for name in LOSSES}
    stock = {name: train(StockOnTrajectories, checkpoint, folder, **DDP, **given[name]) for name in LOSSES}
    kinds = {  # FSDP last: Accelerate leaves it switched on for the process
        "DDP": DDP,
        "FSDP2, EP2": {"ddp_backend": "gloo", "load": partial(load_sharded, checkpoint, fsdp_size=2, ep_size=2)},
        "FSDP2": {"ddp_backend": "gloo", "fsdp": True},
    }
    for kind, options in kinds.items():
        for name in LOSSES_OF[kind]:
            with MeasuredRows() as measured:

                def prepare(trainer, measured=measured):
                    measured.watch(trainer)
                    follow_loads(trainer)

                tree = train(TreeGRPOTrainer, checkpoint, folder, **given[name], **options, **WINDOWS, prepare=prepare)
            label = f"{kind}, {name}"
            assert isinstance(next(tree.trainer.model.parameters()), DTensor) == (kind != "DDP"), label
            assert tree.logs[0]["tree/windows"] > 0, label
            assert tree.logs[0]["tree/exchange_seconds"] > 0, label
            measured.check(label, tree.logs)
            compare(label, tree, stock[name], stock[name])
            assert_equal_on_ranks(label, tree.parameters)
            if name not in WITHIN_MICRO_BATCHES:
                saved = torch.load(folder / f"{name}.pt")
                alone = Run(gradients=saved["gradients"], logs=saved["logs"])
                compare(f"{label}, one rank", tree, alone, alone, metrics=("loss", "grad_norm", "reward"))
                check_biases(label, tree.trainer, saved["loads"], saved["biases"])


def uneven_ranks(folder: Path) -> None:
    """Ranks with 3, 1, 0 and 2 microbatches, then all on one rank, then windows; also shards that are repeated."""
    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}", first_k_dense_replace=1)
    force_fsdp_on_cpu()
    options = {**options_of("dapo", 4), "router_aux_loss_coef": 0.1, "max_steps": 3, "num_iterations": 3}
    stock = train(StockOnTrajectories, checkpoint, folder, **options, **DDP)
    gloo = {"ddp_backend": "gloo"}
    load = partial(load_sharded, checkpoint, ep_size=2)
    replicas = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    cases = {
        "FSDP2, EP2": {**gloo, "load": partial(load, fsdp_size=4)},
        "replicas of FSDP2, EP2": {**gloo, "load": partial(load, fsdp_size=2, dp_replicate_size=2)},
        "replicas of FSDP2": {**gloo, "fsdp": True, "parallelism_config": replicas},
    }
    given = step_planner.plan_step
    for name, case in cases.items():
        rng = np.random.default_rng(0)
        lengths = [[3, 1, 0, 2], [0, 0, 4, 0]]

        def uneven(tree, *args, rng=rng, lengths=lengths, **kwargs):
            return plan_of_lengths(tree, lengths.pop(0), rng) if lengths else given(tree, *args, **kwargs)

        step_planner.plan_step = uneven
        with MeasuredRows() as measured:
            tree = train(TreeGRPOTrainer, checkpoint, folder, **options, **case, **WINDOWS, prepare=measured.watch)
        assert [log["tree/windows"] > 0 for log in tree.logs[:3]] == [False, False, True]
        measured.check(name, tree.logs)
        compare(name, tree, stock, stock)
        if "replicas" in name:
            placements = next(tree.trainer.model.parameters()).placements
            assert placements == (Replicate(), Shard(0)), placements
        step_planner.plan_step = given


BF16_RUNS = {
    "autocast": {"bf16": True},
    "model": {"dtype": torch.bfloat16},
}


def bf16(folder: Path) -> None:
    """Computing in bf16, ranks agree with each other, and with one rank up to what bf16 costs there."""
    from peft import LoraConfig

    checkpoint = save_checkpoint(folder / f"checkpoint{RANK}", first_k_dense_replace=1)
    force_fsdp_on_cpu()
    options = {**options_of("dapo", 2), **WINDOWS}
    gloo = {"ddp_backend": "gloo"}
    load = partial(load_sharded, checkpoint, fsdp_size=2, ep_size=2)
    lora = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)

    def run(**case) -> Run:
        return train(TreeGRPOTrainer, checkpoint, folder, **options, **case)

    # In fp32, adapters of a model whose experts are spread.
    stock = train(StockOnTrajectories, checkpoint, folder, **options_of("dapo", 2), **DDP, lora=lora)
    adapters = run(**gloo, load=load, lora=lora)
    assert all(("lora" in name) == p.requires_grad for name, p in adapters.trainer.model.named_parameters())
    compare("adapters, FSDP2, EP2", adapters, stock, stock)
    assert_equal_on_ranks("adapters, FSDP2, EP2", adapters.parameters)

    cases = {
        "DDP": ("autocast", {**DDP, "bf16": True}),
        "DDP, bf16 model": ("model", {**DDP, "dtype": torch.bfloat16}),
        "FSDP2, EP2": ("autocast", {**gloo, "load": partial(load, mixed_precision=True)}),
        "FSDP2": ("autocast", {**gloo, "fsdp": True, "bf16": True}),
        "FSDP2, bf16 model": ("autocast", {**gloo, "fsdp": True, "bf16": True, "dtype": torch.bfloat16}),
    }
    truth = Run(**torch.load(folder / "fp32.pt"))
    for name, (reference, case) in cases.items():
        tree = run(**case)
        assert all(torch.isfinite(p).all() for p in tree.parameters.values()), name
        assert_equal_on_ranks(name, tree.parameters)
        alone = Run(**torch.load(folder / f"{reference}.pt"))
        error, noise = gradient_error(tree, truth), gradient_error(alone, truth)
        print(f"rank {RANK}: bf16, {name}: gradient {error:.1e} (one rank {noise:.1e})", flush=True)
        assert error <= 2 * noise, name
        loss, expected = tree.logs[0]["loss"], alone.logs[0]["loss"]
        assert abs(loss - expected) <= 2**-7 * max(abs(expected), 1), name
    adapters = run(**gloo, fsdp=True, dtype=torch.bfloat16, lora=lora)  # fp32, on frozen parameters of both dtypes
    dtypes = {(p.dtype, p.requires_grad) for p in adapters.trainer.model.parameters()}
    assert dtypes == {(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)}
    assert_equal_on_ranks("FSDP2, adapters of a bf16 model", adapters.parameters)
    with pytest.raises(ValueError, match="parameters of several dtypes.*bf16=True"):
        run(**gloo, fsdp=True, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="parameters of several dtypes.*mixed_precision=True"):
        load(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="a second time"):
        run(**gloo, fsdp=True, load=load)


if __name__ == "__main__":
    main(globals())
