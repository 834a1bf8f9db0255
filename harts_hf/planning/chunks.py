"""plan_chunks: a round plan -> chunks sorted by level.

For kernels whose only sequential stage is the recurrence over chunks: everything inside a chunk runs at once for all
chunks, and the recurrence walks levels. Index arrays, made once per plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boundaries import locate_boundaries
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
            always a full chunk; -1 for the state above the root.
        root (`np.ndarray` of shape `[chunks of level 0]`, int64): number of each chunk's root, in row order.
        level_offsets (`np.ndarray` of shape `[num_levels + 1]`, int64): offsets of the levels.
        output_slot (`np.ndarray` of shape `[C]`, int64): flat index `chunk * B + slot` of the one place where each row
            is not replayed.
        boundary_chunks (`np.ndarray` of shape `[M]`, int64): chunks whose end states are requested.
    """

    chunk_size: int
    rows: np.ndarray
    parent: np.ndarray
    root: np.ndarray
    level_offsets: np.ndarray
    output_slot: np.ndarray
    boundary_chunks: np.ndarray

    @property
    def num_chunks(self) -> int:
        """Chunks of all levels."""
        return len(self.parent)

    @property
    def num_levels(self) -> int:
        """Levels: chunks of the longest trajectory."""
        return len(self.level_offsets) - 1


def plan_chunks(rounds: RoundPlan, boundary_rows: Sequence[int] = ()) -> ChunkPlan:
    """Cut every sequence into chunks and sort them by level. Linear in tokens, replay included.

    Within a level, chunks keep the order of their sequences.

    Args:
        rounds: sequences of the tree.
        boundary_rows: different rows, each the last of a full chunk: the states after them are requested.

    Raises:
        ValueError: a boundary row is not the last of a full chunk, or is given twice.
    """
    size = rounds.chunk_size
    lengths = np.diff(rounds.cu_seqlens)
    cu_chunks = rounds.chunk_offsets
    num_chunks = int(cu_chunks[-1])

    # In sequence order the parent is the chunk before; for a first chunk, the one of the source that ends at `start`.
    sequence = np.repeat(np.arange(rounds.num_sequences), np.diff(cu_chunks))
    parent = np.arange(-1, num_chunks - 1)
    parent[cu_chunks[:-1]] = rounds.source_chunks

    level = rounds.start[sequence] // size + np.arange(num_chunks) - cu_chunks[sequence]
    order = np.argsort(level, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(num_chunks)

    token_offset = np.arange(len(rounds.rows)) - np.repeat(rounds.cu_seqlens[:-1], lengths)
    slot = place[np.repeat(cu_chunks[:-1], lengths) + token_offset // size] * size + token_offset % size
    rows = np.full(num_chunks * size, -1, dtype=np.int64)
    rows[slot] = rounds.rows

    boundary_sequence, boundary_tokens = locate_boundaries(rounds, boundary_rows)
    num_levels = int(level.max()) + 1
    rows = rows.reshape(num_chunks, size)
    level_offsets = np.searchsorted(level[order], np.arange(num_levels + 1))
    return ChunkPlan(
        chunk_size=size,
        rows=rows,
        parent=np.where(parent < 0, -1, place[parent])[order],
        root=np.unique(rows[: level_offsets[1], 0], return_inverse=True)[1].reshape(-1),
        level_offsets=level_offsets,
        output_slot=slot[rounds.output_positions],
        boundary_chunks=place[cu_chunks[boundary_sequence] + boundary_tokens // size - 1],
    )
