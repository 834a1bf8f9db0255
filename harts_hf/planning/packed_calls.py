"""The calls in which packed variable-length kernels run a tree: by rounds of a plan, or by levels of segments.

For kernels that take initial states and return only final states. Loops run over pieces, never over tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.tree import RowForest

from .boundaries import locate_boundaries
from .rounds import RoundPlan


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Pieces that run in one call on packed sequences, each from an initial state, each returning its final state.

    Attributes:
        rows (`np.ndarray` of shape `[T]`, int64): row of each packed token, replayed rows included.
        cu_seqlens (`np.ndarray` of shape `[n + 1]`, int64): offsets of the pieces in `rows`.
        source (`np.ndarray` of shape `[n]`, int64): piece whose final state is the piece's initial state, counted over
            the pieces of all calls in order; always in an earlier call. -1 - i for the state above root i.
        output_positions (`np.ndarray` of shape `[R]`, int64): positions in `rows` that are not replayed.
        output_rows (`np.ndarray` of shape `[R]`, int64): `rows[output_positions]`.
    """

    rows: np.ndarray
    cu_seqlens: np.ndarray
    source: np.ndarray
    output_positions: np.ndarray
    output_rows: np.ndarray


@dataclass(frozen=True, eq=False)
class PackedCallPlan:
    """Calls in the order in which they can run.

    Attributes:
        calls (`tuple[PackedCall, ...]`): the calls.
        boundary_pieces (`tuple[int, ...]`): pieces whose final states are requested, counted over all calls.
    """

    calls: tuple[PackedCall, ...]
    boundary_pieces: tuple[int, ...] = ()


def plan_packed_calls(rounds: RoundPlan, boundary_rows: Sequence[int] = ()) -> PackedCallPlan:
    """Cut sequences where a state is needed, and group the pieces into calls.

    A piece at a root runs in call 0, every other one call after its source piece. Within a call, pieces keep the order
    of their sequences. There are at least `num_rounds` calls: a sequence that is cut runs over several.

    Args:
        rounds: sequences of the tree.
        boundary_rows: different rows, each the last of a full chunk: the states after them are requested.

    Raises:
        ValueError: a boundary row is not the last of a full chunk, or is given twice.
    """
    lengths = np.diff(rounds.cu_seqlens)
    needs_state = rounds.source >= 0
    boundary_sequence, boundary_tokens = locate_boundaries(rounds, boundary_rows)

    # One key per piece, (sequence, start): the heads of all sequences, and the boundaries where a state is needed.
    span = int((rounds.start + lengths).max()) + 1
    head_keys = np.arange(rounds.num_sequences) * span + rounds.start
    cut_keys = rounds.source[needs_state] * span + rounds.start[needs_state]
    boundary_keys = boundary_sequence * span + rounds.start[boundary_sequence] + boundary_tokens
    is_inside = boundary_tokens < lengths[boundary_sequence]  # at its end, a sequence needs no cut
    keys = np.unique(np.concatenate([head_keys, cut_keys, boundary_keys[is_inside]]))
    sequence = keys // span
    piece_begin = rounds.cu_seqlens[sequence] + keys % span - rounds.start[sequence]

    source = np.arange(-1, len(keys) - 1)
    head_source = np.empty(rounds.num_sequences, dtype=np.int64)
    head_source[needs_state] = np.searchsorted(keys, cut_keys) - 1  # the piece that ends at the cut
    root_rows = rounds.rows[rounds.cu_seqlens[:-1][~needs_state]]
    head_source[~needs_state] = -1 - np.unique(root_rows, return_inverse=True)[1].reshape(-1)
    source[np.searchsorted(keys, head_keys)] = head_source
    boundary_pieces = np.searchsorted(keys, boundary_keys) - 1
    return _group(rounds.rows, piece_begin, source, np.flatnonzero(rounds.is_replayed), boundary_pieces)


def plan_node_calls(tree: RowForest) -> PackedCallPlan:
    """One piece per segment, one call per level of segments: a child starts from its parent's final state.

    The scheme of Tree Training: no replay, and chunks that begin anew at every segment.
    """
    starts = tree.segment_starts()
    parents = tree.parent[starts]
    source = np.searchsorted(starts, parents, side="right") - 1
    roots = np.flatnonzero(parents < 0)
    source[roots] = -1 - np.arange(len(roots))
    return _group(np.arange(tree.num_rows), starts, source, np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))


def _group(
    rows: np.ndarray,
    piece_begin: np.ndarray,
    source: np.ndarray,
    replayed: np.ndarray,
    boundary_pieces: np.ndarray,
) -> PackedCallPlan:
    """Pieces -> calls.

    Args:
        rows: `[T]`, rows of all pieces.
        piece_begin: `[n]`, first token of each piece.
        source: `[n]`, an earlier piece, or negative at a root.
        replayed: tokens that give no output.
        boundary_pieces: pieces whose final states are requested.
    """
    lengths = np.diff(piece_begin, append=len(rows))
    calls: list[int] = []
    for piece_source in source.tolist():
        calls.append(calls[piece_source] + 1 if piece_source >= 0 else 0)
    call = np.array(calls, dtype=np.int64)

    order = np.argsort(call, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    source = np.where(source < 0, source, place[source])[order]
    cu_pieces = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths[order], out=cu_pieces[1:])
    tokens = np.arange(len(rows)) + np.repeat(piece_begin[order] - cu_pieces[:-1], lengths[order])
    rows = rows[tokens]
    gives_output = np.ones(len(rows), dtype=bool)
    gives_output[replayed] = False
    outputs = np.flatnonzero(gives_output[tokens])

    call_pieces = np.searchsorted(call[order], np.arange(max(calls) + 2))
    call_tokens = cu_pieces[call_pieces]
    call_outputs = np.searchsorted(outputs, call_tokens)
    packed = []
    for k in range(len(call_pieces) - 1):
        first_piece, end_piece = call_pieces[k], call_pieces[k + 1]
        call_rows = rows[call_tokens[k] : call_tokens[k + 1]]
        output_positions = outputs[call_outputs[k] : call_outputs[k + 1]] - call_tokens[k]
        packed.append(
            PackedCall(
                rows=call_rows,
                cu_seqlens=cu_pieces[first_piece : end_piece + 1] - call_tokens[k],
                source=source[first_piece:end_piece],
                output_positions=output_positions,
                output_rows=call_rows[output_positions],
            )
        )
    return PackedCallPlan(tuple(packed), tuple(place[boundary_pieces].tolist()))
