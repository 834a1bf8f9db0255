"""Log-probs of a language-model head on a GPU: tiles against all logits at once, and TRL's fused head.

    python benchmarks/log_probs.py [--pairs 32768] [--hidden 1536] [--vocab 157184]

Comparators: `unfused` is a bf16 projection and `cross_entropy` on its bf16 logits, `unfused_fp32` casts them to fp32
first, `trl` is TRL's fused head with its own defaults, where TRL is installed. `tiled` computes log-probs,
`tiled_entropy` entropies too, and their gradient; `tiled_cublas` is `tiled` with all products from cuBLAS. Every job
sums the log-probs and, in `forward_backward`, differentiates in hidden states and weight. Times are medians over
interleaved repeats in one process, after a warm-up, by device events around four runs back to back, or one run above
100 ms; `peak_bytes` is above what was there before, gradients included. Writes a JSON record.
"""

import argparse
import functools
import importlib.metadata
import importlib.util
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from device_timing import command_line, measure
from kernel_trees import SEED

from harts_hf.kernels.log_probs import linear_log_probs

TRL_CHUNK = 32768  # vocabulary entries of a tile: what TRL 1.16 passes


def unfused(hidden, weight, targets, *, dtype: torch.dtype):
    return -F.cross_entropy((hidden @ weight.t()).to(dtype), targets, reduction="sum")


def tiled(hidden, weight, targets, *, with_entropy: bool, **options):
    log_probs, entropies = linear_log_probs(hidden, weight, targets, with_entropy=with_entropy, **options)
    return log_probs.sum() + (0.01 * entropies.sum() if with_entropy else 0)


def of_trl(hidden, weight, targets, *, outputs: tuple[str, ...]):
    from trl.kernels import ChunkedLogProbFunction

    log_probs, entropies, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, 1.0, TRL_CHUNK, None, 1.0, outputs
    )
    return log_probs.sum() + (0.01 * entropies.sum() if outputs else 0)


def jobs_of(functions: dict, hidden, weight, targets, backward: bool) -> dict:
    def job(function):
        def run():
            with torch.set_grad_enabled(backward):
                total = function(hidden, weight, targets)
            if backward:
                torch.autograd.grad(total, (hidden, weight))

        return run

    return {name: job(function) for name, function in functions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=32768)
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--vocab", type=int, default=157184)
    parser.add_argument("--tile", type=int, nargs=2, default=None, help="rows and vocabulary entries of a tile")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "log_probs.json")
    arguments = parser.parse_args()
    generator = torch.Generator("cuda").manual_seed(SEED)
    hidden = torch.randn(arguments.pairs, arguments.hidden, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(arguments.vocab, arguments.hidden, generator=generator, device="cuda")
    weight = (weight / arguments.hidden**0.5).bfloat16()
    targets = torch.randint(0, arguments.vocab, (arguments.pairs,), generator=generator, device="cuda")
    hidden.requires_grad_()
    weight.requires_grad_()

    tile = tuple(arguments.tile) if arguments.tile else None
    functions = {
        "tiled": functools.partial(tiled, with_entropy=False, tile=tile),
        "tiled_cublas": functools.partial(tiled, with_entropy=False, tile=tile, implementation="triton"),
        "tiled_entropy": functools.partial(tiled, with_entropy=True, tile=tile),
        "unfused": functools.partial(unfused, dtype=torch.bfloat16),
        "unfused_fp32": functools.partial(unfused, dtype=torch.float32),
    }
    if importlib.util.find_spec("trl") is not None:
        functions["trl"] = functools.partial(of_trl, outputs=())
        functions["trl_entropy"] = functools.partial(of_trl, outputs=("entropy",))
    record = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "triton")},
        "dtype": "bfloat16",
        "pairs": arguments.pairs,
        "hidden": arguments.hidden,
        "vocab": arguments.vocab,
        "tile": tile or "default",
        "seed": SEED,
    }
    for name, backward in (("forward", False), ("forward_backward", True)):
        jobs = jobs_of(functions, hidden, weight, targets, backward)
        record[name] = measured = measure(jobs, arguments.repeats)
        for job_name, entry in measured.items():
            print(f"  {name:<17}{job_name:<14}{entry}", flush=True)
    both = record["forward_backward"]
    record["time_over_unfused"] = round(both["tiled"]["milliseconds"] / both["unfused"]["milliseconds"], 3)
    print(f"time over unfused {record['time_over_unfused']}")
    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
