"""How the sequences of a RoundPlan reach the kernels: as levels of chunks, or as packed calls.

`plan_chunks` serves kernels whose only sequential stage is the recurrence over chunks: everything inside a chunk runs
at once for all chunks, and the recurrence walks levels. `plan_packed_calls` serves kernels that take packed
variable-length sequences with initial states and return only final states: a sequence is cut wherever its state is
needed, and one call runs all pieces whose states are known. Both are index arrays, made once per plan. Loops run over
pieces, never over tokens.
"""

from dataclasses import dataclass

import numpy as np

from .rounds import RoundPlan


@dataclass(frozen=True, eq=False)
class ChunkPlan:
    """All chunks of a plan, sorted by level: the distance of the chunk from the trajectory's start, in chunks.

    Level `l` is the chunks `level_offsets[l] : level_offsets[l + 1]`. A parent lies in the level before, so a level
    can run once the one before has.

    Attributes:
        chunk_size (`int`): B, in tokens.
        rows (`np.ndarray` of shape `[num_chunks, B]`, int64): row at each slot, replayed rows included; -1 in the
            padding slots past the end of a sequence, always at a chunk's end.
        parent (`np.ndarray` of shape `[num_chunks]`, int64): chunk whose end state is this chunk's initial state,
            always a full chunk; -1 for the zero state.
        level_offsets (`np.ndarray` of shape `[num_levels + 1]`, int64): offsets of the levels.
        output_slot (`np.ndarray` of shape `[C]`, int64): flat index `chunk * B + slot` of the one place where each row
            is not replayed.
    """

    chunk_size: int
    rows: np.ndarray
    parent: np.ndarray
    level_offsets: np.ndarray
    output_slot: np.ndarray

    @property
    def num_chunks(self) -> int:
        """Chunks of all levels."""
        return len(self.parent)

    @property
    def num_levels(self) -> int:
        """Levels: chunks of the longest trajectory."""
        return len(self.level_offsets) - 1


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Pieces that run in one call on packed sequences, each from an initial state, each returning its final state.

    Attributes:
        rows (`np.ndarray` of shape `[T]`, int64): row of each packed token, replayed rows included.
        cu_seqlens (`np.ndarray` of shape `[n + 1]`, int64): offsets of the pieces in `rows`.
        source (`np.ndarray` of shape `[n]`, int64): piece whose final state is the piece's initial state, counted over
            the pieces of all calls in order; always in an earlier call. -1 for the zero state.
        output_positions (`np.ndarray` of shape `[R]`, int64): positions in `rows` that are not replayed.
        output_rows (`np.ndarray` of shape `[R]`, int64): `rows[output_positions]`.
    """

    rows: np.ndarray
    cu_seqlens: np.ndarray
    source: np.ndarray
    output_positions: np.ndarray
    output_rows: np.ndarray


def plan_chunks(rounds: RoundPlan) -> ChunkPlan:
    """Cut every sequence into chunks and sort them by level. Linear in tokens, replay included.

    Within a level, chunks keep the order of their sequences.
    """
    size = rounds.chunk_size
    lengths = np.diff(rounds.cu_seqlens)
    cu_chunks = np.zeros(rounds.num_sequences + 1, dtype=np.int64)
    np.cumsum(-(-lengths // size), out=cu_chunks[1:])
    num_chunks = int(cu_chunks[-1])

    # In sequence order the parent is the chunk before; for a first chunk, the one of the source that ends at `start`.
    sequence = np.repeat(np.arange(rounds.num_sequences), np.diff(cu_chunks))
    parent = np.arange(-1, num_chunks - 1)
    source_start = rounds.start[rounds.source]  # unused where the source is -1
    source_chunk = cu_chunks[rounds.source] + (rounds.start - source_start) // size - 1
    parent[cu_chunks[:-1]] = np.where(rounds.source < 0, -1, source_chunk)

    level = rounds.start[sequence] // size + np.arange(num_chunks) - cu_chunks[sequence]
    order = np.argsort(level, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(num_chunks)

    token_offset = np.arange(len(rounds.rows)) - np.repeat(rounds.cu_seqlens[:-1], lengths)
    slot = place[np.repeat(cu_chunks[:-1], lengths) + token_offset // size] * size + token_offset % size
    rows = np.full(num_chunks * size, -1, dtype=np.int64)
    rows[slot] = rounds.rows
    owned = ~rounds.is_replayed
    output_slot = np.empty(np.count_nonzero(owned), dtype=np.int64)
    output_slot[rounds.rows[owned]] = slot[owned]

    num_levels = int(level.max()) + 1
    return ChunkPlan(
        chunk_size=size,
        rows=rows.reshape(num_chunks, size),
        parent=np.where(parent < 0, -1, place[parent])[order],
        level_offsets=np.searchsorted(level[order], np.arange(num_levels + 1)),
        output_slot=output_slot,
    )


def plan_packed_calls(rounds: RoundPlan) -> tuple[PackedCall, ...]:
    """Cut sequences where another starts from their state, and group the pieces into calls.

    A piece that starts from the zero state runs in call 0, every other one call after its source piece. Within a call,
    pieces keep the order of their sequences. There are at least `num_rounds` calls: a sequence that is cut runs over
    several.
    """
    lengths = np.diff(rounds.cu_seqlens)
    needs_state = rounds.source >= 0

    # One key per piece, (sequence, start): the heads of all sequences, and the boundaries where others start.
    span = int((rounds.start + lengths).max()) + 1
    head_keys = np.arange(rounds.num_sequences) * span + rounds.start
    cut_keys = rounds.source[needs_state] * span + rounds.start[needs_state]
    keys = np.unique(np.concatenate([head_keys, cut_keys]))
    sequence = keys // span
    piece_begin = rounds.cu_seqlens[sequence] + keys % span - rounds.start[sequence]
    piece_lengths = np.diff(piece_begin, append=len(rounds.rows))

    source = np.arange(-1, len(keys) - 1)
    head_source = np.full(rounds.num_sequences, -1, dtype=np.int64)
    head_source[needs_state] = np.searchsorted(keys, cut_keys) - 1  # the piece that ends at the cut
    source[np.searchsorted(keys, head_keys)] = head_source

    calls: list[int] = []
    for piece_source in source.tolist():  # a source precedes its dependents
        calls.append(calls[piece_source] + 1 if piece_source >= 0 else 0)
    call = np.array(calls, dtype=np.int64)

    order = np.argsort(call, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    source = np.where(source < 0, -1, place[source])[order]
    cu_pieces = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(piece_lengths[order], out=cu_pieces[1:])
    tokens = np.arange(len(rounds.rows)) + np.repeat(piece_begin[order] - cu_pieces[:-1], piece_lengths[order])
    rows = rounds.rows[tokens]
    outputs = np.flatnonzero(~rounds.is_replayed[tokens])

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
    return tuple(packed)
