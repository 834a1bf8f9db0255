"""Plans as tensors: the index tables by which the linear-attention kernels walk a tree."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from harts_hf.kernels.chunk_layout import ChunkLayout
from harts_hf.kernels.packed_calls import PackedCall, PackedCalls
from harts_hf.kernels.sequence_layout import SequenceLayout, Units
from harts_hf.planning.chunks import plan_chunks
from harts_hf.planning.packed_calls import PackedCallPlan, plan_node_calls, plan_packed_calls
from harts_hf.planning.rounds import RoundPlan
from harts_hf.planning.sequences import plan_sequences
from harts_hf.tree import RowForest

ToTensor = Callable[[np.ndarray], torch.Tensor]


def make_chunk_layout(
    tree: RowForest, rounds: RoundPlan, to_tensor: ToTensor, boundary_rows: Sequence[int] = ()
) -> ChunkLayout:
    """The layout of a tree's chunks; its other forms are made when they are first used.

    Args:
        tree: the prefix tree.
        rounds: its sequences.
        to_tensor: moves an array to the device of the layer's inputs.
        boundary_rows: different rows, each the last of a full chunk: the states after them are requested.

    Raises:
        ValueError: a boundary row is not the last of a full chunk, or is given twice.
    """
    chunks = plan_chunks(rounds, boundary_rows)
    return ChunkLayout(
        chunk_size=chunks.chunk_size,
        rows=to_tensor(chunks.rows),
        parent=to_tensor(chunks.parent),
        root=to_tensor(chunks.root),
        level_offsets=tuple(chunks.level_offsets.tolist()),
        output_slot=to_tensor(chunks.output_slot),
        boundary_chunks=to_tensor(chunks.boundary_chunks),
        make_sequences=lambda: _sequence_layout(rounds, to_tensor, boundary_rows),
        make_packed_calls=lambda: _packed_calls(plan_packed_calls(rounds, boundary_rows), to_tensor),
        make_node_calls=lambda: _packed_calls(plan_node_calls(tree), to_tensor),
    )


def _sequence_layout(rounds: RoundPlan, to_tensor: ToTensor, boundary_rows: Sequence[int]) -> SequenceLayout:
    plan = plan_sequences(rounds, boundary_rows)
    request = np.full(plan.num_slots, -1, dtype=np.int64)
    request[plan.requested_slots] = np.arange(len(plan.requested_slots))
    return SequenceLayout(
        chunk_size=rounds.chunk_size,
        num_roots=plan.num_roots,
        num_slots=plan.num_slots,
        num_groups=len(plan.group_sizes),
        num_root_groups=int(plan.group_offsets[plan.num_roots]),
        rows=to_tensor(rounds.rows),
        owned_rows=to_tensor(plan.owned_rows),
        output_positions=to_tensor(rounds.output_positions),
        cu_seqlens=to_tensor(rounds.cu_seqlens),
        chunk_indices=to_tensor(plan.chunk_indices),
        sequences=_as_tensors(Units, plan.sequences, to_tensor),
        pieces=_as_tensors(Units, plan.pieces, to_tensor),
        group_offsets=to_tensor(plan.group_offsets),
        group_sizes=to_tensor(plan.group_sizes),
        group=to_tensor(plan.group),
        rank_in_group=to_tensor(plan.rank_in_group),
        topological_order=to_tensor(plan.backward_order),
        longest=plan.longest,
        longest_tokens=int(np.diff(plan.sequences.tokens[plan.longest]).item()),
        request=to_tensor(request),
        requested_slots=to_tensor(plan.requested_slots),
    )


def _packed_calls(plan: PackedCallPlan, to_tensor: ToTensor) -> PackedCalls:
    calls = tuple(_as_tensors(PackedCall, call, to_tensor) for call in plan.calls)
    return PackedCalls(calls, plan.boundary_pieces)


def _as_tensors(cls, plan, to_tensor: ToTensor):
    """A dataclass of tensors from the arrays of a plan that have the same names."""
    return cls(**{field.name: to_tensor(getattr(plan, field.name)) for field in dataclasses.fields(cls)})
