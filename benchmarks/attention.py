"""Softmax attention on trees, on a GPU: the backends against each other and against dense causal kernels.

    HARTS_ROLLOUTS=... python benchmarks/attention.py [--rows 32768 65536] [--shape mla gqa] [--only NAME ...]

Shapes: `mla` is 16 heads of 192 (keys) and 128 (values), `gqa` 32 heads of 128 with 8 key heads. TFLOP/s count visible
pairs alone, 2K + 2V a pair and head forward and 8K + 6V forward and backward, so hidden pairs of partial tiles are
lost time. Dense causal kernels run once per shape and number of rows: cuDNN, torch's flash attention (with values
padded to the keys' width) and flash-attn-4.

Times are medians over interleaved repeats in one process, after a warm-up, by device events around four runs back to
back; `spread` is the interquartile range over the median. `tables_milliseconds` is the making of the first backend's
tables, which all layers and recomputation share. Trees come from rollouts in HARTS_ROLLOUTS; without it the synthetic
ones alone are run. Writes a JSON record.
"""

import argparse
import functools
import itertools
import json
import os
import statistics
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from device_timing import command_line, installed_versions, measure
from kernel_trees import SEED, rollout_trees, synthetic_trees
from torch.nn.attention import SDPBackend, sdpa_kernel

from harts_hf.batch import CompactBatch
from harts_hf.kernels.attention_layout import AttentionLayout
from harts_hf.kernels.attention_paths import attention_paths
from harts_hf.kernels.tree_attention import tree_attention
from harts_hf.kernels.tree_attention_flash4 import flash4_is_installed
from harts_hf.tree import PrefixTree

SHAPES = {"mla": (16, 16, 192, 128), "gqa": (32, 8, 128, 128)}  # H, Hkv, K, V
MAX_GATHERED = 1_000_000  # keys of a varlen call that is still run


def make_inputs(rows: int, shape: str):
    """q, k, v as a model's projections give them, `[1, rows, heads, dim]`, and the output's gradient."""
    heads, kv_heads, key_dim, value_dim = SHAPES[shape]
    generator = torch.Generator("cuda").manual_seed(SEED)
    sizes = ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim), (heads, value_dim))
    tensors = [torch.randn(1, rows, h, d, generator=generator, device="cuda").bfloat16() for h, d in sizes]
    return [x.requires_grad_() for x in tensors[:3]], tensors[3]


def job(attend, inputs, grad, backward: bool):
    """A function of no arguments that runs `attend(q, k, v)`, forward or with its backward."""

    def run():
        with torch.set_grad_enabled(backward):
            output = attend(*inputs)
        if backward:
            torch.autograd.grad(output, inputs, grad)

    return run


def sdpa(q, k, v, *, backend: SDPBackend, pad: bool):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    value_dim = v.shape[-1]
    if pad:
        v = F.pad(v, (0, q.shape[-1] - value_dim))
    with sdpa_kernel(backend):
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
    return output[..., :value_dim].transpose(1, 2)


def dense_kernels() -> dict:
    """Causal attention over all rows, by name."""
    kernels = {
        "cudnn": functools.partial(sdpa, backend=SDPBackend.CUDNN_ATTENTION, pad=False),
        "flash": functools.partial(sdpa, backend=SDPBackend.FLASH_ATTENTION, pad=True),
    }
    if flash4_is_installed():
        from flash_attn.cute import flash_attn_func

        kernels["flash4_causal"] = lambda q, k, v: flash_attn_func(q, k, v, causal=True)[0]
    return kernels


def tree_kernels(layout: AttentionLayout, shape: str, names: list[str]) -> dict:
    scale = SHAPES[shape][2] ** -0.5

    def attend(q, k, v, *, implementation):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return tree_attention(q, k, v, layout, scale=scale, implementation=implementation)

    return {name: functools.partial(attend, implementation=name) for name in names}


def rates(kernels: dict, inputs, grad, pairs: int, shape: str, repeats: int) -> dict:
    """Times of each kernel forward, and forward with backward; with TFLOP/s over `pairs` pairs."""
    heads, _, key_dim, value_dim = SHAPES[shape]
    record = {}
    for direction, backward, per_pair in (
        ("forward", False, 2 * key_dim + 2 * value_dim),
        ("forward_backward", True, 8 * key_dim + 6 * value_dim),
    ):
        jobs = {name: job(attend, inputs, grad, backward) for name, attend in kernels.items()}
        record[direction] = measured = measure(jobs, repeats)
        for entry in measured.values():
            entry["tflops"] = round(pairs * heads * per_pair / entry["milliseconds"] / 1e9, 1)
        print(f"  {direction}: { {n: (e['milliseconds'], e['tflops']) for n, e in measured.items()} }", flush=True)
    return record


def tables_milliseconds(batch: CompactBatch, inputs, shape: str, implementation: str) -> float:
    """Median time of what a forward makes for a new layout, beyond a forward with the tables at hand."""
    extra = []
    for _ in range(7):
        layout = AttentionLayout(batch.attention_layout().subtree_end, batch.position_ids)
        attend = tree_kernels(layout, shape, [implementation])[implementation]
        times = []
        for _ in range(2):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            with torch.no_grad():
                attend(*inputs)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        extra.append(times[0] - times[1])
    return round(1e3 * statistics.median(extra), 3)


def run(sequences, shape: str, best_dense: float, arguments: argparse.Namespace) -> dict:
    batch = CompactBatch(PrefixTree.from_sequences(sequences), device="cuda")
    tree, layout = batch.tree, batch.attention_layout()
    pairs = int((tree.position_ids.astype(np.int64) + 1).sum())
    gathered = len(attention_paths(layout).key_rows)
    names = [name for name in arguments.implementation if name != "varlen" or gathered <= MAX_GATHERED]
    if not names:
        return {"rows": tree.num_rows, "gathered_keys": gathered, "note": "too many gathered keys"}
    inputs, grad = make_inputs(tree.num_rows, shape)
    record = {
        "rows": tree.num_rows,
        "expanded_tokens": tree.num_tokens,
        "visible_pairs": pairs,
        "visible_of_causal": round(pairs / (tree.num_rows * (tree.num_rows + 1) / 2), 4),
        "gathered_keys": gathered,
        **rates(tree_kernels(layout, shape, names), inputs, grad, pairs, shape, arguments.repeats),
        "tables_milliseconds": tables_milliseconds(batch, inputs, shape, names[0]),
    }
    tables, both = record["tables_milliseconds"], record["forward_backward"][names[0]]["milliseconds"]
    record["tflops_over_best_dense"] = round(record["forward_backward"][names[0]]["tflops"] / best_dense, 3)
    print(
        f"  tables {tables} ms, {100 * tables / both:.1f}% of one layer; "
        f"{record['tflops_over_best_dense']} of the best dense causal kernel",
        flush=True,
    )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[32768, 65536], help="most rows of a tree")
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument(
        "--implementation", nargs="+", default=["flash4", "flex", "varlen"], choices=["flash4", "flex", "varlen"]
    )
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--only", nargs="*", default=[""], help="run the trees whose name contains one of these")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    arguments = parser.parse_args()
    folder = os.environ.get("HARTS_ROLLOUTS")
    packages = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl")
    record = {
        "command": command_line(),
        "device": torch.cuda.get_device_name(),
        "versions": installed_versions(*packages),
        "dtype": "bfloat16",
        "seed": SEED,
        "shapes": {
            name: dict(zip(("heads", "kv_heads", "key_dim", "value_dim"), s, strict=True))
            for name, s in SHAPES.items()
        },
        "dense_causal": {},
        "trees": {},
    }
    for rows, shape in itertools.product(arguments.rows, arguments.shape):
        title = f"{shape}/{rows}"
        print(f"{title}/dense causal", flush=True)
        inputs, grad = make_inputs(rows, shape)
        dense = rates(dense_kernels(), inputs, grad, rows * (rows + 1) // 2, shape, arguments.repeats)
        record["dense_causal"][title] = dense
        best = max(e["tflops"] for e in dense["forward_backward"].values())
        cases = list(itertools.islice(synthetic_trees(rows), 2))  # a chain with 60 branches, a wide fork
        if folder:
            cases = list(rollout_trees(Path(folder), rows)) + cases
        for name, sequences in cases:
            if any(part in name for part in arguments.only):
                print(f"{title}/{name}", flush=True)
                record["trees"][f"{title}/{name}"] = run(sequences, shape, best, arguments)
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
    print(f"wrote {arguments.json}")


if __name__ == "__main__":
    main()
