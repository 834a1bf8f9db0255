"""Whole-model training steps: prefix trees against trajectories run apart, padded, and against other tree schemes.

    HARTS_ROLLOUTS=... python benchmarks/end_to_end.py [--sets NAME ...] [--variants NAME ...] [--rows 32768]
        [--tokens 250000] [--max-seconds 400] [--layers N] [--json PATH] [--plot PATH]

A 7.9B model of Ling-3.0-tiny's shape with random weights (`hybrid_model.py`), bf16, full activation recomputation, on
one GPU; a small one in fp32 on the CPU, where numbers mean nothing. A step is forward, loss and backward of whole
groups of rollouts (`rollout_steps.py`); the optimizer's update is timed apart. Variants:

- `expanded`: each trajectory on its own, several packed in a microbatch: the same model code and head on a forest
  without sharing, one stock call of flash-linear-attention per linear layer, the same attention kernel. The microbatch
  size is the fastest of `--expanded-rows` on the first set.
- `padded`: the stock forward on padded batches, log-probs by TRL's function. It may run a part of the step alone.
- `tree`: ours, planned without sharing windows, and `tree_windows` with them.
- `rounds`, `rounds_windows`: the paper's scheme for linear attention, one packed call per round.
- `nodewise`: one packed call per level of segments. It has no chunk boundaries, so no sharing windows.

Times are the median of complete passes after one microbatch of warm-up; `spread` is the largest difference between
passes, over their shortest, up to the last microbatch that all have run. Rows are counted at the embedding.
`efficiency` is the speedup over `expanded` divided by compression. The record is written after each measurement, and
what no longer fits `--max-seconds` is named as skipped. Ends with an error if
a variant failed, or its loss differs from Expanded's by more than rounding.
"""

import argparse
import importlib.metadata
import json
import logging
import os
import statistics
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from device_timing import command_line
from end_to_end_report import derive, plot, print_table, wrong_losses
from hybrid_model import build_hybrid_model
from kernel_breakdown import profile_components
from rollout_steps import RolloutStep, load_step, set_names
from step_variants import StepRun, StepRunner, build_batches, pack, tree_forward
from step_work import H200_FLOPS, ForwardFlops

from harts_hf.planning.microbatches import plan_step


@dataclass(frozen=True)
class Variant:
    """A way to run a step: `linear_attention` on CUDA, and whether the plan has sharing windows."""

    linear_attention: str | None = None
    windows: bool = False


VARIANTS = {
    "expanded": Variant("rounds"),  # of a forest without sharing there is one
    "padded": Variant(),
    "tree": Variant("tree"),
    "tree_windows": Variant("tree", windows=True),
    "rounds": Variant("rounds"),
    "rounds_windows": Variant("rounds", windows=True),
    "nodewise": Variant("nodewise"),
}
# Measured in this order, each group over all sets, so that what is left out for want of time matters least.
ORDER = (
    ("expanded", "tree"),
    ("tree_windows",),
    ("padded",),
    ("rounds",),
    ("nodewise",),
    ("rounds_windows",),
)
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
            "versions": versions(),
            "seed": arguments.seed,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "layers": self.model.config.num_hidden_layers,
            "experts_implementation": self.model.config._experts_implementation,
            "recomputation": "every layer, non-reentrant",
            "build_seconds": round(time.perf_counter() - build_begin, 2),
            "rows": arguments.rows,
            "attention": arguments.attention or "automatic",
            "forward_flops": vars(self.flops),
            "flops": "mfu: three forwards of matmuls and visible attention pairs; hfu: with recomputation, four, and "
            "4.5 for attention; both over 989e12 a second",
            "expanded_rows": arguments.expanded_rows[0],
            "steps": {},
        }

    @property
    def seconds_left(self) -> float:
        return self.arguments.max_seconds - (time.perf_counter() - self.begin)

    def write(self) -> None:
        """Put derived figures into the record and write it."""
        derive(self.record)
        if self.arguments.json is not None:
            self.arguments.json.write_text(json.dumps(self.record, indent=1) + "\n")

    def add_step(self, step: RolloutStep) -> StepRunner:
        self.record["steps"][step.name] = {
            "remark": step.remark,
            "groups": step.num_groups,
            "trajectories": len(step.trajectories),
            "expanded_tokens": step.num_tokens,
            "scored_tokens": step.num_scored,
            "longest": max(map(len, step.sequences)),
            "longer_than_a_microbatch": f"{step.num_left_out} trajectories of these groups, left out for all variants"
            if self.is_cuda
            else "cut",
            "loss_scale": float((abs(step.advantages) / step.num_scored).sum()),
            "variants": {},
        }
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
            try:
                if name == "padded":
                    variants[name] = self.measure_padded(runner)
                elif name == "expanded":
                    variants[name] = self.measure_expanded(runner)
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
        begin = time.perf_counter()
        plan = plan_step(step.sequences, rows, windows=variant.windows)
        plan_seconds = time.perf_counter() - begin
        if variant.windows and not plan.windows:
            return {"skipped": "the plan has no sharing window: the same as without"}
        tree_seconds = build_batches(plan, step, self.device)
        with tree_forward(self.model, variant.linear_attention if self.is_cuda else None, self.arguments.attention):
            entry = self.passes(runner, lambda **limits: runner.trees(plan, **limits), name)
        if name == "nodewise":
            entry |= {"replay_tokens": 0, "rounds": None}
        return entry | {
            "plan_rows": plan.compact_tokens,
            "windows": len(plan.windows),
            "producer_rows": sum(plan.producer_rows),
            "plan_seconds": round(plan_seconds, 4),
            "tree_seconds": round(tree_seconds, 4),
        }

    def measure_expanded(self, runner: StepRunner) -> dict:
        lengths = [len(s) for s in runner.step.sequences]
        with tree_forward(self.model, "rounds" if self.is_cuda else None, self.arguments.attention):
            if "expanded_rows_tried" not in self.record:
                self.choose_expanded_rows(runner, lengths)
            rows = self.record["expanded_rows"]
            bins = pack(lengths, rows)
            entry = self.passes(runner, lambda **limits: runner.packed(bins, **limits), "expanded")
        return entry | {"max_rows": rows}

    def choose_expanded_rows(self, runner: StepRunner, lengths: list[int]) -> None:
        """Time the fullest microbatch of each size and keep the fastest size for all sets."""
        tried = self.record["expanded_rows_tried"] = {}
        for rows in self.arguments.expanded_rows:
            fullest = max(pack(lengths, rows), key=lambda members: sum(lengths[i] for i in members))
            try:
                runs = [runner.packed([fullest]) for _ in range(2)]  # the first is the warm-up
                tried[rows] = round(runs[1].work.rows / runs[1].seconds, 1)
            except torch.OutOfMemoryError:
                tried[rows] = "out of memory"
        fits = {rows: rate for rows, rate in tried.items() if rate != "out of memory"}
        self.record["expanded_rows"] = max(fits, key=fits.get)
        print(f"  tokens/s by microbatch size: {tried}", flush=True)

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

    def passes(self, runner: StepRunner, run: Callable[..., StepRun], name: str, limit: float | None = None) -> dict:
        """Warm up, run the step twice, or three times if the passes differ, and profile a microbatch."""
        limit = self.arguments.max_seconds_variant if limit is None else limit
        if self.is_cuda:
            torch.cuda.empty_cache()
        run(microbatch_limit=1)
        if self.is_cuda:
            torch.cuda.reset_peak_memory_stats()
        runs = [run(seconds_limit=min(limit, max(self.seconds_left, FEWEST_SECONDS)))]
        peak = torch.cuda.max_memory_allocated() if self.is_cuda else None
        if self.is_cuda and "optimizer" not in self.record:
            self.record["optimizer"] = time_optimizer(self.model)
        repeat_limit = min(limit, self.arguments.repeat_seconds)
        if runs[0].seconds > repeat_limit:  # a later pass will not be complete: it only shows the spread
            repeat_limit /= 2
        while (len(runs) < 2 or (len(runs) < 3 and spread(runs) > STEADY)) and self.seconds_left > repeat_limit:
            runs.append(run(seconds_limit=repeat_limit))
        entry = self.entry(runner, runs) | {"peak_bytes": peak}
        if self.is_cuda and name in self.arguments.profile and name not in self.record.get("profiles", {}):
            if self.seconds_left > FEWEST_SECONDS:
                profile = profile_components(lambda: run(microbatch_limit=1))
                self.record.setdefault("profiles", {})[name] = {"set": runner.step.name} | profile
        return entry

    def entry(self, runner: StepRunner, runs: list[StepRun]) -> dict:
        first = runs[0]
        complete = [r.seconds for r in runs if r.is_complete]
        seconds = statistics.median(complete) if first.is_complete else first.marks[-1]
        tokens = sum(len(runner.step.trajectories[i].token_ids) for i in first.trajectories)
        return {
            "complete": first.is_complete,
            "share_of_tokens": round(tokens / runner.step.num_tokens, 4),
            "seconds": round(seconds, 4),
            "complete_passes": [round(s, 4) for s in complete],
            "spread": round(spread(runs), 4),
            "expanded_tokens": tokens,
            "expanded_tokens_per_second": round(tokens / seconds, 1),
            "microbatches": first.microbatches,
            "rows_computed": first.embedded_rows,
            "replay_tokens": first.work.replay_tokens,
            "rounds": first.work.rounds,
            "mfu": round(self.flops.model_flops(first.work) / seconds / H200_FLOPS, 4),
            "hfu": round(self.flops.hardware_flops(first.work) / seconds / H200_FLOPS, 4),
            "loss": runner.loss_of(first.log_prob_sums),
            "log_prob_sums": {i: round(total, 4) for i, total in sorted(first.log_prob_sums.items())},
            "loss_weights": [float(w) for w in -runner.step.advantages / runner.step.num_scored],
        }


def spread(runs: list[StepRun]) -> float:
    """Largest difference between passes up to the last microbatch that all have run, over the shortest."""
    last = min(len(r.marks) for r in runs) - 1
    times = [r.marks[last] for r in runs]
    return (max(times) - min(times)) / min(times)


def time_optimizer(model) -> dict:
    """Seconds of one update by fused AdamW with moments in the parameters' dtype, at a learning rate of 0.

    The gradients of the pass before are there; a clipping of their norm is part of it, as in training.
    """
    kind = "fused AdamW without a master copy in fp32, clipping included"
    parameters = [p for p in model.parameters() if p.grad is not None]
    try:
        optimizer = torch.optim.AdamW(parameters, lr=0.0, weight_decay=0.0, fused=True)
        times = []
        for _ in range(3):  # the first makes the moments
            torch.cuda.synchronize()
            begin = time.perf_counter()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        result = {"kind": kind, "seconds": round(statistics.median(times[1:]), 4)}
    except torch.OutOfMemoryError:
        return {"kind": kind, "seconds": "out of memory"}
    del optimizer
    torch.cuda.empty_cache()
    return result


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in ("torch", "triton", "transformers", "trl", "fla-core", "flash-attn-4", "causal-conv1d"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def summary(entry: dict) -> str:
    if "skipped" in entry:
        return f"skipped: {entry['skipped']}"
    share = "" if entry["complete"] else f", {100 * entry['share_of_tokens']:.0f}% of the step"
    return (
        f"{entry['seconds']:.2f} s, {entry['expanded_tokens_per_second']:,.0f} expanded tokens/s, "
        f"{entry['rows_computed']:,} rows, compression {entry['compression']:.2f}{share}"
    )


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=None, help="names of rollout_steps.SETS; by default all")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rows", type=int, default=32768 if cuda else 512, help="most rows of a tree's microbatch")
    parser.add_argument("--tokens", type=int, default=250_000 if cuda else 2_000, help="expanded tokens of a step")
    parser.add_argument("--expanded-rows", type=int, nargs="+", default=[16384, 32768, 65536] if cuda else [256, 512])
    parser.add_argument("--padded-rows", type=int, default=49152 if cuda else 512, help="most of a padded batch")
    parser.add_argument("--max-seconds", type=float, default=400.0, help="of the whole run, but for imports")
    parser.add_argument("--max-seconds-variant", type=float, default=60.0, help="of a first pass over a step")
    parser.add_argument("--repeat-seconds", type=float, default=9.0, help="of a later pass over a step")
    parser.add_argument("--padded-seconds", type=float, default=5.0, help="of a first padded pass")
    parser.add_argument("--layers", type=int, default=None, help="of the model, instead of 24")
    parser.add_argument("--attention", default=None, help="of all variants but padded; see tree_attention.py")
    parser.add_argument("--profile", nargs="*", default=["expanded", "tree", "padded", "nodewise"], help="variants")
    parser.add_argument("--seed", type=int, default=0)
    default = Path(__file__).parent / "results" / "end_to_end.json" if cuda else None
    parser.add_argument("--json", type=Path, default=default, help="by default in results/, on the CPU none")
    parser.add_argument("--plot", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("harts_hf.kernels.tree_attention").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", message=".*use_cache.*")
    benchmark = Benchmark(arguments)
    folder = Path(os.environ["HARTS_ROLLOUTS"]) if "HARTS_ROLLOUTS" in os.environ else None
    runners = []
    for name in arguments.sets or set_names(folder):
        step = load_step(
            name,
            folder,
            num_tokens=arguments.tokens,
            max_length=arguments.rows if benchmark.is_cuda else min(200, arguments.rows),
            vocab_size=benchmark.model.config.vocab_size,
            cut=not benchmark.is_cuda,
            seed=arguments.seed,
        )
        runners.append(benchmark.add_step(step))
    for group in ORDER:
        for runner in runners:
            for name in group:
                if name in arguments.variants:
                    benchmark.measure(runner, name)
    benchmark.record["seconds"] = round(time.perf_counter() - benchmark.begin, 1)
    benchmark.write()
    print_table(benchmark.record)
    if arguments.json is not None:
        print(f"wrote {arguments.json}")
    if arguments.plot is not None:
        plot(benchmark.record, arguments.plot)
    wrong = wrong_losses(benchmark.record)
    if wrong:
        sys.exit(f"losses differ by more than rounding: {wrong}")
    if benchmark.has_failed:
        sys.exit("some variants failed: see the record")


if __name__ == "__main__":
    main()
