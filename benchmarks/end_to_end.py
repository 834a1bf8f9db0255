"""Whole-model training steps: prefix trees against trajectories run apart, padded, and against other tree schemes.

    HARTS_ROLLOUTS=... python benchmarks/end_to_end.py [--sets NAME ...] [--variants NAME ...] [--rows 32768]
        [--tokens 250000] [--max-seconds 400] [--layers N] [--json PATH | --extend PATH] [--plot PATH]

A 7.9B model of Ling-3.0-tiny's shape with random weights (`hybrid_model.py`), bf16, full activation recomputation, on
one GPU; a small one in fp32 on the CPU, where numbers mean nothing. A step is forward, loss and backward of whole
groups of rollouts (`rollout_steps.py`); the optimizer's update is timed apart. Variants:

- `expanded`: each trajectory on its own, several packed in a microbatch: the same model code and head on a forest
  without sharing, one stock call of flash-linear-attention per linear layer (on such a forest `rounds` is that), the
  same attention kernel. The microbatch size is the fastest of `--expanded-rows` on the first set; the tree's kernels
  take the stock call's place where they are faster.
- `padded`: the stock forward on padded batches, log-probs by TRL's function, experts by "grouped_mm". It may run a
  part of the step alone.
- `tree`: ours, planned without sharing windows, and `tree_windows` with them.
- `rounds`, `rounds_windows`: the paper's scheme for linear attention, one packed call per round.
- `nodewise`: one packed call per level of segments. It has no chunk boundaries, so no sharing windows.
- `expanded_half`: `expanded` in microbatches of half the size: its loss shows what another microbatch alone changes.
- `expanded_grouped_mm`, `tree_grouped_mm`: with Transformers' own experts implementation, norms, SwiGLU layers and
  forget gates; on the first set alone.

On a GPU all other variants, `expanded` and `padded` too, run norms, SwiGLU layers and forget gates fused
(`fuse_modules`), unless --modules says stock.

Times are the median of complete passes, if there are any, after a warm-up of one microbatch, or of all up to the first
consumer of a window; `spread` is the largest difference between complete passes, or between all up to the last
microbatch that each has run, over the shortest. Rows are counted at the embedding. `efficiency` is the speedup over
`expanded` divided by compression. The record is written after each measurement, and what no longer fits
`--max-seconds` is named as skipped. With `--extend` a later run adds its variants to a record and compares them with
that record's `expanded`. Ends with an error if a variant failed, or its loss differs from Expanded's by more than
rounding.
"""

import argparse
import logging
import os
import sys
import time
import warnings
from pathlib import Path

import torch
from end_to_end_report import plot, print_table, wrong_losses
from hybrid_model import MODULES, default_modules
from rollout_steps import load_step, set_names
from step_benchmark import VARIANTS, Benchmark

from harts_hf.trainers.grpo_config import WINDOW_COST_ROWS

# Measured in this order, each group over all sets, so that what is left out for want of time matters least.
ORDER = (
    ("expanded", "tree"),
    ("tree_windows",),
    ("rounds",),
    ("nodewise",),
    ("expanded_half",),
    ("expanded_grouped_mm", "tree_grouped_mm"),
    ("padded",),
    ("rounds_windows",),
)


def parse_arguments() -> argparse.Namespace:
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=None, help="names of rollout_steps.SETS; by default all")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--rows", type=int, default=32768 if cuda else 512, help="most rows of a tree's microbatch")
    parser.add_argument("--tokens", type=int, default=250_000 if cuda else 2_000, help="expanded tokens of a step")
    parser.add_argument("--expanded-rows", type=int, nargs="+", default=[16384, 32768, 65536] if cuda else [256, 512])
    parser.add_argument(
        "--window-cost-rows",
        type=int,
        default=WINDOW_COST_ROWS["cuda"] if cuda else 0,
        help="rows that a sharing window must save to be opened; the trainer's default",
    )
    parser.add_argument("--padded-rows", type=int, default=49152 if cuda else 512, help="most of a padded batch")
    parser.add_argument("--max-seconds", type=float, default=400.0, help="of the whole run, but for imports")
    parser.add_argument("--max-seconds-variant", type=float, default=60.0, help="of a first pass over a step")
    parser.add_argument("--repeat-seconds", type=float, default=9.0, help="of a later pass over a step")
    parser.add_argument("--padded-seconds", type=float, default=4.0, help="of a first padded pass")
    parser.add_argument("--layers", type=int, default=None, help="of the model, instead of 24")
    parser.add_argument("--attention", default=None, help="of all variants but padded; see tree_attention.py")
    parser.add_argument("--experts", default="harts", help="experts implementation of all variants but those named")
    parser.add_argument(
        "--modules", default=default_modules(), choices=MODULES, help="of all variants but those named"
    )
    parser.add_argument(
        "--profile",
        nargs="*",
        default=["expanded", "tree", "tree_windows", "tree_grouped_mm"],
        help="variants; with windows, up to the first consumer of one",
        choices=list(VARIANTS),
    )
    parser.add_argument("--seed", type=int, default=0)
    default = Path(__file__).parent / "results" / "end_to_end.json" if cuda else None
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", type=Path, default=default, help="by default in results/, on the CPU none")
    output.add_argument("--extend", type=Path, default=None, help="a record of the same conditions, added to in place")
    parser.add_argument("--plot", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.extend is not None:
        arguments.json = arguments.extend
    return arguments


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
            thin=not benchmark.is_cuda,
            seed=arguments.seed,
        )
        runners.append(benchmark.add_step(step))
    for group in ORDER:
        for runner in runners:
            for name in group:
                if VARIANTS[name].first_step_only and runner is not runners[0]:
                    continue
                if name in arguments.variants:
                    benchmark.measure(runner, name)
    benchmark.record["seconds"] = round(
        benchmark.record.get("seconds", 0.0) + time.perf_counter() - benchmark.begin, 1
    )
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
