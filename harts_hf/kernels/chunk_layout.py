"""ChunkLayout: the index tensors by which linear attention walks a prefix tree.

Linear attention runs sequences that each start at a chunk boundary, replay fewer than B rows and follow a path. The
same sequences come in two forms. As chunks, sorted by level (distance from the trajectory's start, in chunks): work
inside chunks runs at once for all, and only the state recurrence goes from level to level. As packed calls:
variable-length sequences for kernels that take initial states and return final states. Derived properties are made
once per plan and kept, so that all layers share them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class PackedCallLayout:
    """Sequences, or pieces of them, that run in one packed call: their initial states come from earlier calls.

    All tensors are int64 on the device of the layer's inputs.

    Attributes:
        rows (`[T]`): row of each packed token, replayed rows included.
        cu_seqlens (`[n + 1]`): offsets of the pieces in `rows`, leading 0.
        source (`[n]`): piece whose final state is this piece's initial state, counted over the pieces of all calls in
            order, always in an earlier call; -1 for the zero state.
        output_positions (`[R]`): positions in `rows` that are not replayed.
        output_rows (`[R]`): `rows[output_positions]`.
    """

    rows: torch.Tensor
    cu_seqlens: torch.Tensor
    source: torch.Tensor
    output_positions: torch.Tensor
    output_rows: torch.Tensor

    @cached_property
    def sources(self) -> tuple[int, ...]:
        """`source` on the host."""
        return tuple(self.source.tolist())

    @cached_property
    def cu_seqlens_cpu(self) -> torch.Tensor:
        """`cu_seqlens` on the host, from which kernels build their launch tables without waiting for the device."""
        return self.cu_seqlens.cpu()


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """All chunks of a tree, sorted by level, and the same work as packed calls.

    Chunks of level `l` are `level_offsets[l] : level_offsets[l + 1]`. A chunk of level 0 starts from the zero state,
    any other from the end state of its parent, a full chunk of the level before. Consecutive slots of a chunk hold a
    row and its child. All tensors are int64 on the device of the layer's inputs.

    Attributes:
        chunk_size (`int`): B, in tokens.
        rows (`[num_chunks, B]`): row at each slot, replayed rows included; -1 in padding slots, at a chunk's end.
        parent (`[num_chunks]`): chunk whose end state is the initial state; -1 for the zero state.
        level_offsets (`tuple[int, ...]`): offsets of the levels, leading 0.
        output_slot (`[C]`): flat index `chunk * B + slot` of the one place where each row is not replayed.
        packed_calls (`tuple[PackedCallLayout, ...]`): the packed calls, in the order in which they can run.
    """

    chunk_size: int
    rows: torch.Tensor
    parent: torch.Tensor
    level_offsets: tuple[int, ...]
    output_slot: torch.Tensor
    packed_calls: tuple[PackedCallLayout, ...]

    @property
    def num_rows(self) -> int:
        """C."""
        return len(self.output_slot)

    @property
    def num_chunks(self) -> int:
        """Chunks of all levels."""
        return len(self.parent)

    @cached_property
    def row_parents(self) -> tuple[int, ...]:
        """Parent row of each row, on the host; -1 at roots."""
        before = torch.where(self.parent < 0, -1, self.rows[self.parent, -1])
        parents = torch.cat([before[:, None], self.rows[:, :-1]], dim=1)
        return tuple(parents.flatten()[self.output_slot].tolist())

    @cached_property
    def packed_rows(self) -> torch.Tensor:
        """`[sum of T]`: rows of all packed calls, one after another."""
        return torch.cat([call.rows for call in self.packed_calls])

    @cached_property
    def packed_output(self) -> torch.Tensor:
        """`[C]`: position in `packed_rows` where each row is not replayed."""
        positions = torch.empty_like(self.output_slot)
        begin = 0
        for call in self.packed_calls:
            positions[call.output_rows] = call.output_positions + begin
            begin += len(call.rows)
        return positions

    @cached_property
    def packed_call_hands_over(self) -> tuple[bool, ...]:
        """Whether some later call starts from a final state of each packed call."""
        used = {piece for call in self.packed_calls for piece in call.sources}
        result, begin = [], 0
        for call in self.packed_calls:
            end = begin + len(call.sources)
            result.append(not used.isdisjoint(range(begin, end)))
            begin = end
        return tuple(result)
