"""The queries of a tree in runs, each with all the keys on its path: what a packed varlen call needs.

A run is a maximal stretch of rows of which each is a child of the row before. Its queries see the rows from the
trajectory's start to the run's start, and the run causally: causal attention aligned at the last query and key.
"""

from dataclasses import dataclass

import torch

from .attention_layout import AttentionLayout


@dataclass(frozen=True, eq=False)
class AttentionPaths:
    """N runs, in the order of their rows.

    Attributes:
        cu_seqlens_q (`[N + 1]`, int32): first row of each run, and p + C.
        cu_seqlens_k (`[N + 1]`, int32): first key of each run among the gathered ones, and their number.
        key_rows (`[cu_seqlens_k[-1]]`, int64): row of each gathered key: the sum of the runs' path lengths.
        longest_q (`int`): rows of the longest run.
        longest_k (`int`): keys of the longest path.
    """

    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    key_rows: torch.Tensor
    longest_q: int
    longest_k: int


def attention_paths(layout: AttentionLayout) -> AttentionPaths:
    """The layout's runs, made once; rows that are given are queries too.

    Linear in the gathered keys; waits for the layout's device.
    """
    return layout.table("paths", lambda: _make_paths(layout))


def _make_paths(layout: AttentionLayout) -> AttentionPaths:
    end, positions = layout.subtree_end.cpu(), layout.position_ids.cpu()
    num_rows = layout.num_keys
    starts_run = torch.ones(num_rows, dtype=torch.bool)
    starts_run[1:] = end[:-1] <= torch.arange(1, num_rows)  # the row before has no child
    begins = starts_run.nonzero()[:, 0].tolist()
    # In depth-first order the entries above a run's own are those of its ancestors.
    path = torch.empty(int(positions.max()) + 1, dtype=torch.int64)
    key_rows, key_counts = [], []
    for begin, stop in zip(begins, begins[1:] + [num_rows], strict=True):
        depth = int(positions[begin])
        path[depth : depth + stop - begin] = torch.arange(begin, stop)
        key_rows.append(path[: depth + stop - begin].clone())
        key_counts.append(depth + stop - begin)
    query_offsets = torch.tensor(begins + [num_rows])
    key_offsets = torch.tensor([0] + key_counts).cumsum(0)
    device = layout.subtree_end.device
    return AttentionPaths(
        cu_seqlens_q=query_offsets.to(device, torch.int32),
        cu_seqlens_k=key_offsets.to(device, torch.int32),
        key_rows=torch.cat(key_rows).to(device),
        longest_q=int(query_offsets.diff().max()),
        longest_k=max(key_counts),
    )
