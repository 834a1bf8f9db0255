"""Time of the exchange of a step's trajectories between the processes of one machine, over gloo.

    python benchmarks/exchange.py

5,000 trajectories that nest 5,000 deep and 5,000 of 8 random tokens, dealt out to the processes, are given to all of
them: token ids and masks (`share_trajectories`). Each process then checks that it holds all. One run to warm up, then
the median of the others; a run is as long as its slowest process. Milliseconds per MB that one process receives.

Prints a line per number of processes and writes benchmarks/results/exchange.json.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from harts_hf.distributed.ranks import Ranks
from harts_hf.trainers.micro_batches import PlacedTrajectory
from harts_hf.trainers.planned_step import share_trajectories

RESULT = Path(__file__).parent / "results" / "exchange.json"
DEPTH = 5_000


def exchange(repeats: int, seed: int) -> dict:
    """On each process: what one received, and the seconds of each run."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    chain = np.random.default_rng(seed).integers(0, 1000, DEPTH)
    short = np.random.default_rng(seed + 1 + rank).integers(0, 1000, (DEPTH // size, 8))
    sequences = [chain[: n + 1] for n in range(rank, DEPTH, size)] + list(short)
    placed = [
        PlacedTrajectory(ids, np.arange(len(ids)) > 0, micro_batch=0, row=i, first_column=-1)
        for i, ids in enumerate(sequences)
    ]
    seconds = []
    for _ in range(repeats + 1):
        ranks = Ranks(torch.device("cpu"))
        dist.barrier()
        start = time.perf_counter()
        shared = share_trajectories(ranks, placed, [(len(placed), DEPTH - 1)])
        slowest = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
        assert len(shared.trajectories) == 2 * DEPTH
    dist.barrier()
    return {"megabytes_received": ranks.received_bytes / 1e6, "seconds": seconds[1:]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="timed runs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # where rank 0 of a run leaves its result
    arguments = parser.parse_args()
    if arguments.worker is not None:
        result = exchange(arguments.repeats, arguments.seed)
        if dist.get_rank() == 0:
            arguments.worker.write_text(json.dumps(result))
        return
    record = {
        "command": f"python benchmarks/exchange.py --repeats {arguments.repeats} --seed {arguments.seed}",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}; gloo, loopback",
        "versions": {"python": platform.python_version(), **{p: version(p) for p in ("numpy", "torch")}},
        "seed": arguments.seed,
        "dtype": "int32 token ids with the mask in their lowest bit, int64 headers",
        "trajectories": 2 * DEPTH,
        "depth": DEPTH,
        "processes": {},
    }
    for size in (2, 4):
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "result.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
            command += [__file__, "--repeats", str(arguments.repeats), "--seed", str(arguments.seed)]
            subprocess.run([*command, "--worker", str(result)], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
            measured = json.loads(result.read_text())
        seconds = measured.pop("seconds")
        median = statistics.median(seconds)
        entry = {
            **measured,
            "median_seconds": median,
            "min_seconds": min(seconds),
            "max_seconds": max(seconds),
            "milliseconds_per_megabyte": 1000 * median / measured["megabytes_received"],
        }
        record["processes"][size] = entry
        print(size, "processes:", json.dumps(entry), flush=True)
    RESULT.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
