"""Time and peak memory of building prefix trees of real rollouts: PrefixTree against two tries made token by token.

    python benchmarks/prefix_tree.py --rollouts FOLDER

FOLDER (default: $HARTS_ROLLOUTS) holds the rollouts as `*.npz`: `tokens` of all episodes, their `offsets`, and per
episode `turn_ptr` into `turn_end`, the position at which each model turn ends. Step-wise inputs have one trajectory
per model turn, with the whole context before it, so that the trajectories of one episode nest.

Methods:

- `prefix_tree`: `PrefixTree.from_sequences`: rows in depth-first order, positions, parents, subtrees, counts.
- `prefix_tree_and_rows`: that, and the rows of every trajectory.
- `dict_trie`: one dict of children per node, parents and counts; nodes in order of arrival.
- `trl_add`: TRL's `TreeRow.add` for every trajectory: nodes in order of arrival, the nodes of every trajectory.
- `trl_add_and_pack`: that, and `TreeRow.pack` without trained tokens: depth-first order, positions, and the gather
  indices of its attention.

Each (input, method) runs in a process of its own on one thread, with one untimed run on 20 trajectories before. Peak
memory is the process's high-water mark less the mark before the first run, so imports and input tokens do not count.
Methods that take minutes on the largest input skip it. Rows must agree between methods; TRL keys a node on its token
and the next one, so its nodes must number rows - roots + distinct trajectories. Nothing is drawn at random.

Prints a table and writes benchmarks/results/prefix_tree.json.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np

from harts_hf import PrefixTree

RESULT = Path(__file__).parent / "results" / "prefix_tree.json"

ALL_METHODS = ("prefix_tree", "prefix_tree_and_rows", "dict_trie", "trl_add", "trl_add_and_pack")
# Data set, one trajectory per model turn, number of trajectories (None: all), methods.
CASES = (
    ("swe_bench_gemini3", True, None, ("prefix_tree", "prefix_tree_and_rows")),
    ("swe_bench_gemini3", True, 400, ALL_METHODS),
    ("tau_bench_airline_gpt4o", False, None, ALL_METHODS),
    ("tot_game24_bfs_tree", False, None, ALL_METHODS),
)


def read_trajectories(path: Path, step_wise: bool, limit: int | None) -> list[np.ndarray]:
    """Token ids of the trajectories of a data set, as int32 views of one array."""
    with np.load(path) as data:
        tokens, offsets, turn_ptr, turn_end = (data[k] for k in ("tokens", "offsets", "turn_ptr", "turn_end"))
    trajectories = [tokens[a:b] for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    if step_wise:
        turns = [turn_end[a:b] for a, b in zip(turn_ptr[:-1], turn_ptr[1:], strict=True)]
        trajectories = [t[:end] for t, ends in zip(trajectories, turns, strict=True) for end in ends]
    return trajectories[:limit]


def build_dict_trie(trajectories: list[np.ndarray]) -> int:
    """Number of nodes of a trie with a dict of children per node."""
    roots: dict[int, int] = {}
    children: list[dict[int, int]] = []
    parents: list[int] = []
    counts: list[int] = []
    for trajectory in trajectories:
        node, below = -1, roots
        for token in trajectory.tolist():
            child = below.get(token)
            if child is None:
                child = below[token] = len(children)
                children.append({})
                parents.append(node)
                counts.append(0)
            counts[child] += 1
            node, below = child, children[child]
    return len(children)


def prepare(method: str, trajectories: list[np.ndarray]):
    """The method's input, in the form that it takes, and the function to time: input -> number of rows or nodes."""
    if method == "prefix_tree":
        return trajectories, lambda given: PrefixTree.from_sequences(given).num_rows
    if method == "prefix_tree_and_rows":

        def build(given):
            tree = PrefixTree.from_sequences(given)
            rows = tree.all_rows()
            assert len(rows) == len(given)
            return tree.num_rows

        return trajectories, build
    if method == "dict_trie":
        return trajectories, build_dict_trie

    import torch
    from trl.experimental.async_grpo.packing import TreeRow

    longest = max(map(len, trajectories))
    untrained = torch.zeros(longest, dtype=torch.long)
    samples = [
        {
            "input_ids": torch.from_numpy(t),
            "completion_mask": untrained[: len(t)],
            "old_log_probs": untrained[: len(t)],
            "advantage": 0.0,
            "group_id": 0,
        }
        for t in trajectories
    ]

    def build_tree_row(given):
        row = TreeRow()
        for sample in given:
            row.add(sample)
        if method == "trl_add_and_pack":
            assert len(row.pack()["input_ids"]) == len(row.tokens)
        return len(row.tokens)

    return samples, build_tree_row


def measure(path: Path, step_wise: bool, limit: int | None, method: str, repeats: int) -> dict:
    """Run one method on one input, in the calling process: rows or nodes, seconds of each repeat, peak bytes."""
    given, build = prepare(method, read_trajectories(path, step_wise, limit))
    build(given[:20])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        rows = build(given)
        seconds.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"rows": rows, "seconds": seconds, "peak_bytes": (peak - before) * 1024}


def describe(path: Path, step_wise: bool, limit: int | None) -> dict:
    """Sizes of an input, from its tree."""
    tree = PrefixTree.from_sequences(read_trajectories(path, step_wise, limit))
    repeated = (tree.sorted_lcp == tree.lengths[tree.sorted_order]) & (tree.sorted_lcp > 0)
    distinct = tree.num_trajectories - int(repeated.sum())
    return {
        "trajectories": tree.num_trajectories,
        "distinct_trajectories": distinct,
        "tokens": tree.num_tokens,
        "rows": tree.num_rows,
        "roots": int((tree.parent < 0).sum()),
        "compression": tree.compression,
    }


def in_own_process(function, *arguments):
    """Result of `function(*arguments)`, run by a fresh interpreter."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def cpu_name() -> str:
    """Name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rollouts", type=Path, default=os.environ.get("HARTS_ROLLOUTS"), help="folder with *.npz")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs of each method")
    arguments = parser.parse_args()
    if arguments.rollouts is None:
        parser.error("give --rollouts or set HARTS_ROLLOUTS")

    # For the processes below: one thread, and no warning that TRL's module is experimental.
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", TRL_EXPERIMENTAL_SILENCE="1")
    record = {
        "command": f"python benchmarks/prefix_tree.py --rollouts $HARTS_ROLLOUTS --repeats {arguments.repeats}",
        "device": f"{cpu_name()}, 1 thread",
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("numpy", "torch", "trl")}},
        "seed": None,
        "dtype": "int32 token ids",
        "inputs": [],
    }
    print(record["device"], record["versions"], "seed", record["seed"], record["dtype"], flush=True)
    for data_set, step_wise, limit, methods in CASES:
        path = arguments.rollouts / f"{data_set}.npz"
        sizes = in_own_process(describe, path, step_wise, limit)
        name = (
            f"{data_set}, {'step-wise' if step_wise else 'episodes'}, {'all' if limit is None else f'first {limit}'}"
        )
        print(f"\n{name}: {sizes}", flush=True)
        results = {}
        for method in methods:
            result = in_own_process(measure, path, step_wise, limit, method, arguments.repeats)
            nodes_of_trl = sizes["rows"] - sizes["roots"] + sizes["distinct_trajectories"]
            assert result["rows"] == (nodes_of_trl if method.startswith("trl") else sizes["rows"]), (method, result)
            seconds = result.pop("seconds")
            results[method] = {
                **result,
                "median_seconds": statistics.median(seconds),
                "min_seconds": min(seconds),
                "max_seconds": max(seconds),
            }
            print(
                f"  {method:21} {statistics.median(seconds):8.3f} s ({min(seconds):.3f} .. {max(seconds):.3f}),"
                f" {sizes['tokens'] / statistics.median(seconds) / 1e6:6.1f} M tokens/s,"
                f" peak {result['peak_bytes'] / 2**20:6.0f} MiB, {result['rows']} rows",
                flush=True,
            )
        record["inputs"].append({"name": name, **sizes, "methods": results})
    RESULT.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwrote {RESULT.relative_to(Path.cwd()) if RESULT.is_relative_to(Path.cwd()) else RESULT}")


if __name__ == "__main__":
    main()
