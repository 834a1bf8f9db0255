"""What `end_to_end.py` measures of one variant on one step: passes, memory, planning, work, a profile."""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from device_timing import command_line, installed_versions
from end_to_end_report import derive
from extended_record import add_step_facts, extend_record, read_record
from hybrid_model import build_hybrid_model, choose_modules
from kernel_breakdown import profile_components
from optimizer_timing import time_optimizer
from rollout_steps import RolloutStep
from step_entry import entry_of, spread, summary
from step_run import StepRun
from step_variants import StepRunner, build_batches, pack, tree_forward
from step_work import ForwardFlops

from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.plan import StepPlan


@dataclass(frozen=True)
class Variant:
    """A way to run a step.

    Attributes:
        linear_attention: implementation on CUDA.
        windows: whether the plan has sharing windows.
        experts: implementation; the run's by default.
        modules: "fused" or "stock"; the run's by default.
        first_step_only: run on the first step alone.
    """

    linear_attention: str | None = None
    windows: bool = False
    experts: str | None = None
    modules: str | None = None
    first_step_only: bool = False


VARIANTS = {
    "expanded": Variant(),
    "padded": Variant(experts="grouped_mm"),
    "tree": Variant("tree"),
    "tree_windows": Variant("tree", windows=True),
    "rounds": Variant("rounds"),
    "rounds_windows": Variant("rounds", windows=True),
    "nodewise": Variant("nodewise"),
    "expanded_half": Variant(),
    "expanded_grouped_mm": Variant(experts="grouped_mm", modules="stock", first_step_only=True),
    "tree_grouped_mm": Variant("tree", experts="grouped_mm", modules="stock", first_step_only=True),
}
PACKAGES = ("torch", "triton", "transformers", "trl", "fla-core", "flash-attn-4", "causal-conv1d")
STEADY = 0.03  # a spread above this asks for a third pass
FEWEST_SECONDS = 3.0  # left for a measurement to begin


class Benchmark:
    """Measures variants on steps, within a time limit, and keeps the record."""

    def __init__(self, arguments: argparse.Namespace):
        self.arguments = arguments
        self.begin = time.perf_counter()
        self.has_failed = False
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.is_cuda = self.device.type == "cuda"
        build_begin = time.perf_counter()
        self.model = build_hybrid_model(self.device, arguments.seed, arguments.layers)
        self.flops = ForwardFlops.of(self.model)
        self.record = {
            "command": command_line(),
            "device": torch.cuda.get_device_name() if self.is_cuda else "cpu",
            "versions": {"python": sys.version.split()[0]} | installed_versions(*PACKAGES),
            "seed": arguments.seed,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": self.model.config.num_hidden_layers,
            "experts_implementation": arguments.experts,
            "modules": arguments.modules,
            "recomputation": "every layer, non-reentrant",
            "build_seconds": round(time.perf_counter() - build_begin, 2),
            "rows": arguments.rows,
            "window_cost_rows": arguments.window_cost_rows,
            "attention": arguments.attention or "automatic",
            "forward_flops": vars(self.flops),
            "flops": "mfu: three forwards of matmuls and visible attention pairs; hfu: with recomputation, four, and "
            "4.5 for attention; both over 989e12 a second, without what linear attention computes in its kernels",
            "steps": {},
        }
        if arguments.extend is not None:
            self.record = extend_record(read_record(arguments.extend), self.record)

    @property
    def seconds_left(self) -> float:
        return self.arguments.max_seconds - (time.perf_counter() - self.begin)

    def write(self) -> None:
        """Put derived figures into the record and write it."""
        derive(self.record)
        if self.arguments.json is not None:
            self.arguments.json.write_text(json.dumps(self.record, indent=1) + "\n")

    def add_step(self, step: RolloutStep) -> StepRunner:
        facts = {
            "remark": step.remark,
            "groups": step.num_groups,
            "trajectories": len(step.trajectories),
            "expanded_tokens": step.num_tokens,
            "scored_tokens": step.num_scored,
            "longest": max(map(len, step.sequences)),
            "longer_than_a_microbatch": f"{step.num_left_out} trajectories of these groups, left out for all variants"
            if self.is_cuda
            else "tokens are left out, the longest are cut",
        }
        add_step_facts(self.record, step.name, facts)
        return StepRunner(self.model, step)

    def measure(self, runner: StepRunner, name: str) -> None:
        """Measure one variant on one step, unless time is over."""
        variants = self.record["steps"][runner.step.name]["variants"]
        variant = VARIANTS[name]
        print(f"[{time.perf_counter() - self.begin:5.0f} s] {runner.step.name} {name}", flush=True)
        if not self.is_cuda and name in ("rounds", "rounds_windows", "nodewise"):
            variants[name] = {"skipped": "needs CUDA"}
        elif self.seconds_left < FEWEST_SECONDS:
            variants[name] = {"skipped": "out of time"}
        else:
            self.model.set_experts_implementation(variant.experts or self.arguments.experts)
            choose_modules(self.model, variant.modules or self.arguments.modules)
            try:
                if name == "padded":
                    variants[name] = self.measure_padded(runner)
                elif name.startswith("expanded"):
                    variants[name] = self.measure_expanded(runner, name)
                else:
                    variants[name] = self.measure_trees(runner, variant, name)
            except (RuntimeError, ValueError) as error:  # out of memory too: the others are still to be measured
                traceback.print_exc()
                variants[name] = {"skipped": f"failed: {type(error).__name__}: {error}"}
                self.has_failed = True
            self.model.zero_grad(set_to_none=True)
        self.write()
        print(f"  {summary(variants[name])}", flush=True)

    def measure_trees(self, runner: StepRunner, variant: Variant, name: str) -> dict:
        step, rows = runner.step, self.arguments.rows
        linear_attention = variant.linear_attention if self.is_cuda else None
        warm_up = plan_step(step.sequences[:4], rows, windows=variant.windows)
        build_batches(warm_up, step, self.device, linear_attention)
        begin = time.perf_counter()
        cost = CostModel(producer=self.arguments.window_cost_rows)
        plan = plan_step(step.sequences, rows, windows=variant.windows, cost=cost)
        plan_seconds = time.perf_counter() - begin
        if variant.windows and not plan.windows:
            return {"skipped": "the plan has no sharing window: the same as without"}
        tree_seconds = build_batches(plan, step, self.device, linear_attention)
        with tree_forward(self.model, linear_attention, self.arguments.attention):
            entry = self.passes(runner, lambda **limits: runner.trees(plan, **limits), name, first=first_part(plan))
        if name == "nodewise":
            entry |= {"replay_tokens": 0, "rounds": None}
        return entry | {
            "plan_rows": plan.compact_tokens,
            "windows": len(plan.windows),
            "producer_rows": sum(plan.producer_rows),
            "plan_seconds": round(plan_seconds, 4),
            "tree_seconds": round(tree_seconds, 4),
        }

    def measure_expanded(self, runner: StepRunner, name: str) -> dict:
        lengths = [len(s) for s in runner.step.sequences]
        if "expanded_chosen" not in self.record:
            self.choose_expanded(runner, lengths)
        rows, linear_attention = self.record["expanded_chosen"]
        rows = rows // 2 if name == "expanded_half" else rows
        bins = pack(lengths, rows)
        with tree_forward(self.model, linear_attention, self.arguments.attention):
            entry = self.passes(runner, lambda **limits: runner.packed(bins, **limits), name)
        return entry | {"max_rows": rows, "linear_attention": linear_attention}

    def choose_expanded(self, runner: StepRunner, lengths: list[int]) -> None:
        """Time the fullest microbatch of each size, and at the fastest the tree's kernels in place of the stock ones.

        The fastest serves all sets.
        """
        rates = {}

        def time_fullest(rows: int, linear_attention: str | None) -> None:
            fullest = max(pack(lengths, rows), key=lambda members: sum(lengths[i] for i in members))
            with tree_forward(self.model, linear_attention, self.arguments.attention):
                try:
                    runs = [runner.packed([fullest]) for _ in range(2)]  # the first is the warm-up
                except torch.OutOfMemoryError:
                    return
            rates[rows, linear_attention] = round(runs[1].work.rows / runs[1].seconds, 1)

        for rows in self.arguments.expanded_rows:
            time_fullest(rows, "rounds" if self.is_cuda else None)
        if self.is_cuda:
            time_fullest(max(rates, key=rates.get)[0], "tree")
        self.record["expanded_tokens_per_second"] = {
            f"{rows} rows, linear attention {name}": rate for (rows, name), rate in rates.items()
        }
        self.record["expanded_chosen"] = max(rates, key=rates.get)
        print(f"  tokens/s of one microbatch: {rates}", flush=True)

    def measure_padded(self, runner: StepRunner) -> dict:
        step, limit = runner.step, self.arguments.padded_seconds
        batch_size = max(1, self.arguments.padded_rows // max(map(len, step.sequences)))

        def run(**limits) -> StepRun:
            return runner.padded(batch_size, **limits)

        while True:
            try:
                return self.passes(runner, run, "padded", limit) | {"batch_size": batch_size}
            except torch.OutOfMemoryError:
                if batch_size == 1:
                    raise
            batch_size //= 2
            print(f"  out of memory: padded batches of {batch_size} trajectories", flush=True)

    def passes(
        self, runner: StepRunner, run: Callable[..., StepRun], name: str, limit: float | None = None, first: int = 1
    ) -> dict:
        """Warm up, run the step twice, or three times if the passes differ, and profile.

        The first `first` microbatches warm up and are profiled.
        """
        limit = self.arguments.max_seconds_variant if limit is None else limit
        if self.is_cuda:
            torch.cuda.empty_cache()
        run(microbatch_limit=first)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        runs = [run(seconds_limit=min(limit, max(self.seconds_left, FEWEST_SECONDS)))]
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else None
        if self.is_cuda and "optimizer" not in self.record:
            self.record["optimizer"] = time_optimizer(self.model)
            torch.cuda.reset_peak_memory_stats()
        repeat_limit = min(limit, self.arguments.repeat_seconds)
        if runs[0].seconds > repeat_limit:  # a later pass will not be complete: it only shows the spread
            repeat_limit /= 2
        while (len(runs) < 2 or (len(runs) < 3 and spread(runs) > STEADY)) and self.seconds_left > repeat_limit:
            runs.append(run(seconds_limit=repeat_limit))
        if peak is not None:  # the first pass may have ended early
            peak = max(peak, torch.cuda.max_memory_allocated())
        entry = entry_of(runner, runs, self.flops) | {"peak_bytes": peak}
        if self.is_cuda and name in self.arguments.profile and name not in self.record.get("profiles", {}):
            if self.seconds_left > FEWEST_SECONDS:
                self.profile(name, runner.step.name, lambda: run(microbatch_limit=first), first)
        return entry

    def profile(self, name: str, set_name: str, job: Callable[[], StepRun], microbatches: int) -> None:
        """Record where the GPU's time goes in a variant's first microbatches; a failure costs the profile alone."""
        try:
            profile = profile_components(job)
        except RuntimeError as error:
            traceback.print_exc()
            profile = {"failed": str(error)}
            self.has_failed = True
        self.record.setdefault("profiles", {})[name] = {"set": set_name, "microbatches": microbatches} | profile


def first_part(plan: StepPlan) -> int:
    """How many of a plan's first microbatches hold a forward of a producer and a consumer; one without windows.

    A producer runs just before its first consumer and does not count; its backward comes after the last.
    """
    return next((i + 1 for i, microbatch in enumerate(plan.microbatches) if microbatch.window is not None), 1)
