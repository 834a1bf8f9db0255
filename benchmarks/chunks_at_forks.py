"""Linear attention without replay, for comparison: chunks begin anew at every fork and every hand-off.

The package starts a branch at the last chunk boundary before its fork and replays the rows since. Here the state is
taken at the fork itself instead, as a scheme without replay would. The same kernels run, on a forest in which every
chain between forks is filled up with rows of zero key, value, log decay and beta: they leave the state as it is, so
every chain ends on a chunk boundary. The result is the same in exact arithmetic; a trajectory's chunks no longer lie
where they lie when it runs alone. Forward alone is meant: nothing here serves recomputation of a producer.
"""

import contextlib
import functools
import importlib
import weakref
from collections.abc import Iterator

import numpy as np
import torch

from harts_hf.batch import CompactBatch
from harts_hf.kernels.chunk_layout import ChunkLayout
from harts_hf.layouts import make_chunk_layout
from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.families import family_of
from harts_hf.models.linear_attention_seam import CHUNK_SIZE, TREE_FUNCTIONS
from harts_hf.planning.rounds import plan_rounds
from harts_hf.tree import RowForest

Tables = weakref.WeakKeyDictionary  # of each batch: its layout, and the place of each of its rows


@contextlib.contextmanager
def without_replay(model) -> Iterator[None]:
    """Run tree forwards of the model's family without replay inside of the context.

    Args:
        model: a hybrid model with a tree forward. In a batch that starts from a boundary, all rows continue it.
    """
    family = family_of(causal_lm_of(model))
    seam = getattr(importlib.import_module(family.modeling_module), family.chunk_function)
    original = seam.tree_version
    seam.tree_version = functools.partial(_chunks_at_forks, kind=family.linear_attention, tables=Tables())
    try:
        yield
    finally:
        seam.tree_version = original


def _chunks_at_forks(
    query: torch.Tensor,  # [1, C, Hk, K]
    key: torch.Tensor,
    value: torch.Tensor,  # [1, C, H, V]
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    kind: str,
    tables: Tables,
    harts_batch: CompactBatch,
    harts_safe_gate: bool,
    harts_layer: int,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,  # the model's own, and what serves training: neither has a use here
) -> tuple[torch.Tensor, None]:
    if harts_batch not in tables:
        tables[harts_batch] = _tables_of(harts_batch)
    layout, place = tables[harts_batch]
    filled = []
    for rows in (query, key, value, g, beta):
        filled.append(rows.new_zeros(layout.num_rows, *rows.shape[2:]))
        filled[-1][place] = rows[0]
    source, sink = harts_batch.starts_from, harts_batch.produces
    state = None if source is None else source.nearest(harts_layer, "state")
    if state is not None:
        state = state.expand(layout.num_roots, -1, -1, -1).contiguous()
    options = {"safe_gate": harts_safe_gate} if kind == "kda" else {}
    output, states = TREE_FUNCTIONS[kind](
        *filled, layout, use_qk_l2norm=use_qk_l2norm_in_kernel, initial_states=state, **options
    )
    if sink is not None:
        sink.put(harts_layer, "state", states)
    return output[place][None], None


def _tables_of(batch: CompactBatch) -> tuple[ChunkLayout, torch.Tensor]:
    tree, first = batch.tree, batch.num_prefix_rows
    own = RowForest(
        token_ids=tree.token_ids[first:],
        position_ids=tree.position_ids[first:],
        parent=np.maximum(tree.parent[first:] - first, -1),
        subtree_end=tree.subtree_end[first:] - first,
        counts=tree.counts[first:],
    )
    forest, place = fill_chains(own, CHUNK_SIZE)

    def to_tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(batch.device)

    boundary_rows = [forest.num_rows - 1] if batch.produces is not None else []  # a producer's rows are one chain
    layout = make_chunk_layout(forest, plan_rounds(forest, CHUNK_SIZE), to_tensor, boundary_rows)
    return layout, to_tensor(place)


def fill_chains(forest: RowForest, chunk_size: int) -> tuple[RowForest, np.ndarray]:
    """Fill every chain between forks up to a whole number of chunks.

    Args:
        forest: rows in depth-first order; positions are not read, so rows may continue a prefix.
        chunk_size: tokens of a chunk.

    Returns:
        The filled forest, with positions counted from its roots and token 0 in the added rows, which stand behind
        those of their chain; and `[C]`, int64: where each row of `forest` stands in it.
    """
    rows = np.arange(forest.num_rows)
    num_children = np.bincount(forest.parent[forest.parent >= 0], minlength=forest.num_rows)
    begins = np.flatnonzero((forest.parent < 0) | (num_children[forest.parent] > 1))
    lengths = np.diff(begins, append=forest.num_rows)
    filled = -(-lengths // chunk_size) * chunk_size
    ends = np.cumsum(filled)
    offsets = ends - filled
    chain = np.repeat(np.arange(len(begins)), lengths)
    place = offsets[chain] + rows - begins[chain]

    parent_chain = np.where(forest.parent[begins] < 0, -1, chain[forest.parent[begins]])
    start = np.zeros(len(begins), dtype=np.int64)
    for k, above in enumerate(parent_chain.tolist()):  # a parent chain comes first
        if above >= 0:
            start[k] = start[above] + filled[above]
    num_rows = int(ends[-1])
    parent = np.arange(-1, num_rows - 1)
    parent[offsets] = np.where(parent_chain < 0, -1, ends[parent_chain] - 1)
    token_ids = np.zeros(num_rows, dtype=np.int64)
    token_ids[place] = forest.token_ids
    last_chain = chain[forest.subtree_end[begins] - 1]  # the last one below each chain's first row
    made = RowForest(
        token_ids=token_ids,
        position_ids=np.repeat(start - offsets, filled) + np.arange(num_rows),
        parent=parent,
        subtree_end=np.repeat(ends[last_chain], filled),
        counts=np.repeat(forest.counts[begins], filled),
    )
    return made, place
