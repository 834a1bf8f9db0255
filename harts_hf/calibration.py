"""calibrate: the coefficients of the planner's cost model, measured with a model's own tree forward and backward.

Synthetic trees vary rows, visible attention pairs and replayed rows apart from each other: flat trees of short and of
long trajectories, and combs whose teeth fork at a chunk's start or at its end. Their times are fitted by
`seconds = fixed + row * rows + pair * pairs + replay * replayed rows` with non-negative coefficients.
"""

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from harts_hf.forward import tree_logprobs
from harts_hf.models.enable import enable_tree_forward
from harts_hf.planning.cost import CostModel
from harts_hf.tree import PrefixTree

CHUNK_SIZE = 64
REPEATS = 5


@dataclass(frozen=True)
class Measurement:
    """One tree's counts and the median seconds of its forward and backward."""

    rows: int
    pairs: int
    replay_rows: int
    seconds: float


def calibrate(model_name: str, device: str, max_rows: int, dtype: torch.dtype = torch.bfloat16) -> dict:
    """Measure the cost model of one model on one device.

    Args:
        model_name: folder or hub name of a config; the weights are random, which does not change the time.
        device: torch device.
        max_rows: rows of the largest tree; training microbatches should be of this size.
        dtype: of weights and activations.

    Returns:
        A dict of JSON types: `cost_model` (fields of `CostModel`, in rows), `row_seconds`, `fixed_seconds`,
        `relative_error` (RMS of the fit over RMS of the times), the measurements, device, dtype and versions.
    """
    config = AutoConfig.from_pretrained(model_name)
    with torch.device(device):
        model = enable_tree_forward(AutoModelForCausalLM.from_config(config, dtype=dtype)).train()
    measurements = [_measure(model, sequences) for sequences in calibration_trees(max_rows, config.vocab_size)]
    fixed, row, pair, replay, error = fit(measurements)
    if row <= 0:
        raise RuntimeError("the times do not grow with rows: the device is too noisy, or max_rows too small")
    cost = CostModel(
        row=1.0, pair=pair / row, replay=min(replay / row, 1.0), chunk_size=CHUNK_SIZE, producer=fixed / row
    )
    on_gpu = torch.device(device).type == "cuda"
    return {
        "model": model_name,
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cost_model": asdict(cost),
        "row_seconds": row,
        "fixed_seconds": fixed,
        "relative_error": error,
        "measurements": [asdict(m) for m in measurements],
    }


def calibration_trees(max_rows: int, vocab_size: int) -> list[list[np.ndarray]]:
    """Trees that vary rows, pairs and replay apart from each other; deterministic."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> np.ndarray:
        return rng.integers(0, vocab_size, count)

    trees = []
    for rows in (max_rows // 4, max_rows // 2, max_rows):
        for length in (512, rows // 4, rows):
            length = min(length, rows)
            trees.append([tokens(length) for _ in range(rows // length)])
        for offset in (0, CHUNK_SIZE - 1):
            trunk = tokens(rows // 2)
            tooth = 2 * CHUNK_SIZE
            forks = np.linspace(CHUNK_SIZE, len(trunk) - CHUNK_SIZE, rows // 2 // tooth).astype(int)
            forks = forks // CHUNK_SIZE * CHUNK_SIZE + offset
            trees.append([trunk, *(np.concatenate([trunk[:fork], tokens(tooth)]) for fork in forks)])
    return trees


def fit(measurements: list[Measurement]) -> tuple[float, float, float, float, float]:
    """Least squares with non-negative coefficients, by dropping the most negative one until none is.

    Returns:
        Seconds: fixed, per row, per pair, per replayed row; and the relative RMS error of the fit.
    """
    counts = np.array([[1, m.rows, m.pairs, m.replay_rows] for m in measurements], dtype=float)
    seconds = np.array([m.seconds for m in measurements])
    scale = counts.max(axis=0)
    scale[scale == 0] = 1.0
    kept = list(range(4))
    while True:
        solution = np.linalg.lstsq(counts[:, kept] / scale[kept], seconds, rcond=None)[0]
        if solution.min() >= 0 or len(kept) == 1:
            break
        del kept[int(solution.argmin())]
    coefficients = np.zeros(4)
    coefficients[kept] = solution / scale[kept]
    error = float(np.linalg.norm(counts @ coefficients - seconds) / np.linalg.norm(seconds))
    return (*map(float, coefficients), error)


def _measure(model: torch.nn.Module, sequences: list[np.ndarray]) -> Measurement:
    tree = PrefixTree.from_sequences(sequences)
    device = next(model.parameters()).device

    def run() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        begin = time.perf_counter()
        logps, _ = tree_logprobs(model, sequences)
        sum(logp.sum() for logp in logps).backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begin
        model.zero_grad(set_to_none=True)
        return seconds

    run()
    lcp, lengths = tree.sorted_lcp, tree.lengths[tree.sorted_order]
    is_fork = (lcp[1:] < lengths[:-1]) & (lcp[1:] > 0)
    return Measurement(
        rows=tree.num_rows,
        pairs=int((tree.position_ids + 1).sum()),
        replay_rows=int((lcp[1:] % CHUNK_SIZE)[is_fork].sum()),
        seconds=statistics.median(run() for _ in range(REPEATS)),
    )
