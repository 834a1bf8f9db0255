"""Times and memory of jobs on a GPU: interleaved repeats in one process, by device events."""

import importlib.metadata
import statistics
import sys
from pathlib import Path

import numpy as np
import torch

# Runs per timing, but for those above 100 ms: as in a model, the host prepares while the device works.
BACK_TO_BACK = 4


def command_line() -> str:
    """How this benchmark was called, without the folders of its record and plot."""
    arguments = sys.argv[1:]
    for option in {"--json", "--plot"}.intersection(arguments):
        place = arguments.index(option)
        del arguments[place : place + 2]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *arguments])


def installed_versions(*packages: str) -> dict[str, str]:
    """Versions of those that are installed; where there are several of one, of that which is imported."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def measure(jobs: dict, repeats: int) -> dict:
    """Median milliseconds, spread, and peak bytes above what was there before, of each job."""
    times = {name: [] for name in jobs}
    peaks = {}
    slow = set()
    for name, job in jobs.items():
        job()  # compiles and tunes
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        job()
        end.record()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
        if begin.elapsed_time(end) > 100:
            slow.add(name)
    for repeat in range(repeats):
        for name, job in jobs.items():
            runs = 1 if name in slow else BACK_TO_BACK
            if name in slow and repeat >= 3:
                continue
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            begin.record()
            for _ in range(runs):
                job()
            end.record()
            torch.cuda.synchronize()
            times[name].append(begin.elapsed_time(end) / runs)
    result = {}
    for name, values in times.items():
        quartiles = np.percentile(values, [25, 75])
        result[name] = {
            "milliseconds": round(statistics.median(values), 4),
            "spread": round(float(quartiles[1] - quartiles[0]) / statistics.median(values), 3),
            "peak_bytes": peaks[name],
        }
    return result


def profile_kernels(job, repeats: int = 3) -> dict:
    """Microseconds of each kernel in one run, the longest first."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(repeats):
            job()
        torch.cuda.synchronize()
    kernels = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    return {e.key[:80]: round(e.self_device_time_total / repeats, 1) for e in kernels}
