"""Linear attention on trees, on a GPU: the tree kernels against calls of the stock kernel.

    HARTS_ROLLOUTS=... python benchmarks/linear_attention.py [--rows 32768] [--heads 16] [--dim 128] [--only NAME ...]

The default shapes are Ling-3.0-tiny's. Times are medians over interleaved repeats in one process, after a warm-up, by
device events around four runs back to back; `spread` is the interquartile range over the median. Comparators:

- `packed`: one stock call over the same sequences, replay included, each from the zero state: as many tokens, no tree;
- `flat`: one stock call over one sequence of as many tokens;
- `expanded`: one stock call over every trajectory (none above 400,000 tokens);
- `tree_kept`, `expanded_kept`: with what the backward would compute again kept from the forward, as a model with
  recomputation of activations runs the tree; Transformers' layers do not ask the stock kernel for it;
- `rounds` and `nodewise`: see `harts_hf/kernels/linear_attention.py`.

Stock Gated DeltaNet cannot run backward on Hopper with Triton 3.4 to 3.7.0; it is timed forward alone there. Trees
come from rollouts in HARTS_ROLLOUTS; without it the synthetic ones alone are run. Writes a JSON record.
"""

import argparse
import importlib.metadata
import json
import os
from pathlib import Path

import numpy as np
import torch
from device_timing import command_line, measure, profile_kernels
from kernel_trees import SEED, rollout_trees, synthetic_trees
from packaging.version import Version

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kda
from harts_hf.kernels.linear_attention_packed import load_packed_function
from harts_hf.tree import PrefixTree

MAX_EXPANDED = 400_000  # tokens of an expanded batch that is still run, in one call


class Case:
    """One tree's inputs, and the work of every implementation."""

    def __init__(self, sequences, kind: str, heads: int, dim: int, safe_gate: bool):
        self.kind = kind
        self.options = {"safe_gate": True} if safe_gate else {}
        self.batch = CompactBatch(PrefixTree.from_sequences(sequences), device="cuda")
        self.layout = self.batch.chunk_layout()
        self.function = tree_kda if kind == "kda" else tree_gated_delta_rule
        self.stock = load_packed_function(kind)
        rows = self.batch.num_rows
        generator = torch.Generator("cuda").manual_seed(SEED)

        def normal(*shape):
            return torch.randn(*shape, generator=generator, device="cuda")

        gate = (rows, heads, dim) if kind == "kda" else (rows, heads)
        self.inputs = [normal(rows, heads, dim).bfloat16() for _ in range(3)]
        self.inputs += [
            -5 * torch.sigmoid(normal(*gate) - 3) if safe_gate else -torch.nn.functional.softplus(normal(*gate) - 1),
            torch.sigmoid(normal(rows, heads)).bfloat16(),
        ]
        self.weight = normal(rows, heads, dim).bfloat16()

    def tree(self, implementation: str, backward: bool, **more):
        """Outputs of a tree implementation, after its backward if wanted."""
        inputs = [x.requires_grad_(backward) for x in self.inputs]
        with torch.set_grad_enabled(backward):
            options = {"use_qk_l2norm": True, "implementation": implementation} | self.options | more
            output = self.function(*inputs, self.layout, **options).output
        if backward:
            torch.autograd.grad(output, inputs, self.weight)
        return output

    def packed_inputs(self, rows: torch.Tensor, cu_seqlens: torch.Tensor):
        """Inputs of a stock call over these rows, gathered outside the timing."""
        inputs = [x.detach()[rows][None] for x in self.inputs]
        return inputs, self.weight[rows][None], cu_seqlens, cu_seqlens.cpu()

    def call(self, prepared, backward: bool, **more):
        inputs, weight, cu_seqlens, cu_seqlens_cpu = prepared
        q, k, v, g, beta = (x.requires_grad_(backward) for x in inputs)
        with torch.set_grad_enabled(backward):
            output, _ = self.stock(
                q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu, **self.options, **more,
            )  # fmt: skip
        if backward:
            torch.autograd.grad(output, inputs, weight)
        return output

    def jobs(self, backward: bool) -> dict:
        """What is timed, by name."""
        sequences = self.layout.sequences
        packed = self.packed_inputs(sequences.rows, sequences.cu_seqlens)
        total = sequences.cu_seqlens[-1:]
        flat = (*packed[:2], torch.cat([total * 0, total]), torch.tensor([0, int(total)]))
        jobs = {"tree": lambda: self.tree("tree", backward)}
        if backward:
            jobs["tree_kept"] = lambda: self.tree("tree", backward, keep_intermediates=True)
        if not backward or self.stock_trains():
            jobs |= {
                "packed": lambda: self.call(packed, backward),
                "flat": lambda: self.call(flat, backward),
                "rounds": lambda: self.tree("rounds", backward),
                "nodewise": lambda: self.tree("nodewise", backward),
            }
            if self.batch.tree.num_tokens <= MAX_EXPANDED:
                rows = torch.from_numpy(np.concatenate(self.batch.rows)).cuda()
                lengths = torch.tensor([0] + [len(r) for r in self.batch.rows], device="cuda")
                expanded = self.packed_inputs(rows, lengths.cumsum(0))
                jobs["expanded"] = lambda: self.call(expanded, backward)
                if backward and self.kind == "kda":
                    jobs["expanded_kept"] = lambda: self.call(expanded, backward, disable_recompute=True)
        return jobs

    def stock_trains(self) -> bool:
        if self.kind == "kda":
            return True
        version = Version(importlib.metadata.version("triton"))
        return torch.cuda.get_device_capability()[0] != 9 or not Version("3.4.0") <= version < Version("3.7.1")


def run(sequences, kind: str, arguments: argparse.Namespace) -> dict:
    case = Case(sequences, kind, arguments.heads, arguments.dim, arguments.safe_gate)
    tree, rounds = case.batch.tree, case.batch.round_plan()
    record = {
        "rows": tree.num_rows,
        "expanded_tokens": tree.num_tokens,
        "replay_tokens": rounds.replay_tokens,
        "sequences": rounds.num_sequences,
        "rounds": rounds.num_rounds,
        "packed_calls": len(case.layout.packed_calls.calls),
        "node_calls": len(case.layout.node_calls.calls),
        "boundaries": case.layout.sequences.num_slots - case.layout.sequences.num_roots,
    }
    for name, backward in (("forward", False), ("forward_backward", True)):
        jobs = {job: run for job, run in case.jobs(backward).items() if job not in arguments.without}
        record[name] = measured = measure(jobs, arguments.repeats)
        ours = measured["tree"]["milliseconds"]
        ratios = {other: round(m["milliseconds"] / ours, 3) for other, m in measured.items() if other != "tree"}
        print(f"  {name:<17} tree {ours:.3f} ms; times slower: {ratios}", flush=True)
    if arguments.profile:
        record["kernel_microseconds"] = {
            name: profile_kernels(job) for name, job in case.jobs(True).items() if name in ("tree", "packed")
        }
    both = record["forward_backward"]
    if "packed" in both:
        record["time_over_packed"] = round(both["tree"]["milliseconds"] / both["packed"]["milliseconds"], 4)
        record["peak_over_packed"] = round(both["tree"]["peak_bytes"] / both["packed"]["peak_bytes"], 4)
    if "expanded" in both:
        speedup = both["expanded"]["milliseconds"] / both["tree"]["milliseconds"]
        tokens = tree.num_tokens / (tree.num_rows + rounds.replay_tokens)
        record |= {"speedup_over_expanded": round(speedup, 3), "token_ratio": round(tokens, 3)}
        speedup = both["expanded"]["milliseconds"] / both["tree_kept"]["milliseconds"]
        record["kept_speedup_over_expanded"] = round(speedup, 3)
    print("  ", {k: v for k, v in record.items() if not isinstance(v, dict)}, flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536], help="most rows of a tree")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--kind", nargs="+", default=["kda"], choices=["kda", "gated_delta_rule"])
    parser.add_argument("--without", nargs="*", default=[], help="comparators that are not run")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", nargs="*", default=[""], help="run the trees whose name contains one of these")
    parser.add_argument("--safe-gate", action="store_true", help="KDA: log decays within [-5, 0], and say so to all")
    parser.add_argument("--profile", action="store_true", help="record the time of every kernel")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "linear_attention.json")
    arguments = parser.parse_args()
    folder = os.environ.get("HARTS_ROLLOUTS")
    versions = {name: importlib.metadata.version(name) for name in ("torch", "triton", "fla-core")}
    record = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "versions": versions,
        "dtype": "bfloat16, decay fp32",
        "safe_gate": arguments.safe_gate,
        "heads": arguments.heads,
        "dim": arguments.dim,
        "seed": SEED,
        "trees": {},
    }
    for kind in arguments.kind:
        for rows in arguments.rows:
            cases = list(synthetic_trees(rows))
            if folder:
                cases = list(rollout_trees(Path(folder), rows)) + cases
            for name, sequences in cases:
                if any(part in name for part in arguments.only):
                    title = f"{kind}/{rows}/{name}"
                    print(title, flush=True)
                    record["trees"][title] = run(sequences, kind, arguments)
                    arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
