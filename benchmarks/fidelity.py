"""How close tree training is to trajectory-by-trajectory training, next to the baseline's own rerun noise.

    HARTS_ROLLOUTS=... python benchmarks/fidelity.py [--parts handoffs microbatch] [--layers 24] [--depths 0 1 2 3 4 5]

Runs the model of hybrid_model.py: on a GPU Ling-3.0-tiny's shape in bf16 with random weights, elsewhere a small one in
fp32. "Expanded" is the stock Transformers model with its own kernels, every trajectory alone; on a GPU its norms,
SwiGLU layers and forget gates are fused, as those of all runs are, unless --modules says stock. A second process does
every run again, at the same time and from the same seed: what differs between the two is rerun noise. With --fp32
Expanded is run once more with all weights and activations in fp32 and stock modules, and every run is compared with
that: how far the tree and Expanded are from the truth says more than how far they are from each other. Two parts:

- handoffs: trajectories whose prefix comes through 0 to 5 hand-offs ("windows") or passes 0 to 5 forks in one
  microbatch ("forks"), with replay and without (chunks_at_forks.py), against Expanded: HARTS, Figure 5. Compared are
  the tokens behind the prefix. "Batches of two" is Expanded again, with another batch size; depth 0 is a tree forward
  of each trajectory alone.
- microbatch: forward and backward of a microbatch of rollouts, from HARTS_ROLLOUTS or the bundled episodes, with
  random advantages. Compared are all predictions, the loss, and the gradients by group of parameters, of which large
  ones are sampled (gradient_samples.py).

Predictions are compared as full-vocabulary distributions, from the final hidden states and the head's weight, beside
the experts that tokens chose. Writes a JSON record after each run, and with --plot a picture of the first part.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from fidelity_cases import GPU_SET, MOST_HANDOFFS, FidelityCases
from fidelity_plot import plot_handoffs
from fidelity_runs import Run
from hybrid_model import MODULES, choose_modules, default_modules

PARTS = ("handoffs", "microbatch")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--depths", nargs="+", type=int, default=list(range(MOST_HANDOFFS + 1)), help="hand-offs")
    parser.add_argument("--layers", type=int, default=None, help="of the model; default: all")
    parser.add_argument("--rows", type=int, default=None, help="most rows of the microbatch")
    parser.add_argument("--max-length", type=int, default=None, help="tokens at which its trajectories are cut")
    parser.add_argument("--set", default=None, help=f"of rollouts; default: {GPU_SET}, or the bundled ones")
    parser.add_argument("--fp32", action="store_true", help="compare all runs with Expanded in fp32 too")
    parser.add_argument("--modules", choices=MODULES, default=default_modules(), help="of all runs but --fp32's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "fidelity.json")
    parser.add_argument("--plot", type=Path, default=None, help="file of a picture of the first part")
    parser.add_argument("--rerun", type=Path, default=None, help="given to the second process: where its runs go")
    arguments = parser.parse_args()
    if not all(0 <= depth <= MOST_HANDOFFS for depth in arguments.depths):
        parser.error(f"depths are 0 to {MOST_HANDOFFS}")
    if arguments.layers is not None and arguments.layers < 2:
        parser.error("a model of one layer has no experts: give at least 2")
    if arguments.plot is not None and "handoffs" not in arguments.parts:
        parser.error("the picture is of the part 'handoffs'")
    if arguments.rerun is not None:
        run_again(arguments)
    else:
        run_and_compare(arguments)


def run_again(arguments) -> None:
    """The second process: every run once more, saved in a folder."""
    cases = FidelityCases(arguments)
    for name, part in cases.parts.items():
        runs = {run_name: vars(run) for run_name, run in part.runs()}
        torch.save({"weight_sum": cases.weight_sum, "runs": runs}, arguments.rerun / f"{name}.pt")


def run_and_compare(arguments) -> None:
    """The first process: runs, comparisons, record, picture."""
    begin = time.perf_counter()

    def write() -> None:
        record["seconds"] = round(time.perf_counter() - begin, 1)
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")

    def draw() -> None:
        if arguments.plot is not None:
            plot_handoffs(record["handoffs"]["runs"], arguments.depths, arguments.plot)

    def compare(part: str, name: str, what: str, other: Run) -> None:
        result = cases.compare(part, runs[part][name], other)
        record[part]["runs"][name][f"against_{what}"] = result
        show(part, name, what, result)

    runs: dict[str, dict[str, Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        second = subprocess.Popen([sys.executable, *sys.argv, "--rerun", folder])
        try:
            cases = FidelityCases(arguments)
            record = cases.describe()
            for name, part in cases.parts.items():
                runs[name] = {}
                for run_name, run in part.runs():
                    runs[name][run_name] = run
                    record[name]["runs"][run_name] = {} if run.loss is None else {"loss": run.loss}
                    if run_name != "expanded":
                        compare(name, run_name, "expanded", runs[name]["expanded"])
                    if "depth 0" in runs[name] and run_name != "depth 0":
                        compare(name, run_name, "depth_0", runs[name]["depth 0"])
                    write()
            if second.wait():
                raise RuntimeError(f"the second process ended with {second.returncode}")
            for name in cases.parts:
                again = torch.load(Path(folder) / f"{name}.pt")
                if again["weight_sum"] != cases.weight_sum:
                    raise RuntimeError("the second process made other weights from the same seed")
                for run_name in runs[name]:
                    compare(name, run_name, "rerun", Run(**again["runs"][run_name]))
                write()
        finally:
            second.kill()
            second.wait()
    draw()
    if arguments.fp32:
        cases.model.float()  # nothing is run in the first dtype after this
        choose_modules(cases.model, "stock")
        for name, part in cases.parts.items():
            _, truth = next(part.runs())
            for run_name in runs[name]:
                compare(name, run_name, "fp32", truth)
            write()
        draw()
    print(f"wrote {arguments.json}, {record['seconds']} s")


def show(part: str, name: str, what: str, result: dict) -> None:
    """Print the means, and of gradients all."""
    print(
        f"{part:<11}{name:<33} against {what:<9} KL {result['symmetric_kl_mean']:.2e}  "
        f"NLL {result['nll_difference_mean']:.2e}  1 - cosine {1 - result['cosine_mean']:.2e}  "
        f"equal {result['equal_states']:.3f}  other experts {result['tokens_with_other_experts']:.3f}",
        flush=True,
    )
    if "gradients" in result:
        print(f"    |loss difference| {result['loss_difference']:.2e}")
        for group, values in result["gradients"].items():
            print(f"    {group:<22} cosine {values['cosine']:.8f}  difference {values['relative_difference']:.2e}")


if __name__ == "__main__":
    main()
