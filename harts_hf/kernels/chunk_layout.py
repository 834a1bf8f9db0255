"""ChunkLayout: the index tensors by which linear attention walks a prefix tree.

Linear attention runs sequences that each start at a chunk boundary, replay fewer than B rows and follow a path. The
same work comes in several forms, one for each implementation: as chunks sorted by level (distance from the
trajectory's start, in chunks), as sequences for one launch, or as packed calls. Forms other than the chunks are made
when they are first asked for, once per plan, and all layers share them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from .packed_calls import PackedCalls
from .sequence_layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class ChunkLayout:
    """All chunks of a tree, sorted by level, and the same work in other forms.

    Chunks of level `l` are `level_offsets[l] : level_offsets[l + 1]`. A chunk of level 0 starts from the state above
    its root, any other from the end state of its parent, a full chunk of the level before. Consecutive slots of a
    chunk hold a row and its child. All tensors are int64 on the device of the layer's inputs.

    Attributes:
        chunk_size (`int`): B, in tokens.
        rows (`[num_chunks, B]`): row at each slot, replayed rows included; -1 in padding slots, at a chunk's end.
        parent (`[num_chunks]`): chunk whose end state is the initial state; -1 for the state above the root.
        root (`[chunks of level 0]`): number of each chunk's root, in row order.
        level_offsets (`tuple[int, ...]`): offsets of the levels, leading 0.
        output_slot (`[C]`): flat index `chunk * B + slot` of the one place where each row is not replayed.
        boundary_chunks (`[M]`): chunks whose end states are requested.
        make_sequences, make_packed_calls, make_node_calls: make the other forms.
    """

    chunk_size: int
    rows: torch.Tensor
    parent: torch.Tensor
    root: torch.Tensor
    level_offsets: tuple[int, ...]
    output_slot: torch.Tensor
    boundary_chunks: torch.Tensor
    make_sequences: Callable[[], SequenceLayout]
    make_packed_calls: Callable[[], PackedCalls]
    make_node_calls: Callable[[], PackedCalls]

    @property
    def num_rows(self) -> int:
        """C."""
        return len(self.output_slot)

    @property
    def num_chunks(self) -> int:
        """Chunks of all levels."""
        return len(self.parent)

    @cached_property
    def num_roots(self) -> int:
        """Rows without a parent."""
        return int(self.root.max()) + 1

    @cached_property
    def row_parents(self) -> tuple[int, ...]:
        """Parent row of each row, on the host; -1 at roots."""
        before = torch.where(self.parent < 0, -1, self.rows[self.parent, -1])
        parents = torch.cat([before[:, None], self.rows[:, :-1]], dim=1)
        return tuple(parents.flatten()[self.output_slot].tolist())

    @cached_property
    def boundary_rows(self) -> tuple[int, ...]:
        """Last row of each chunk whose end state is requested, on the host."""
        return tuple(self.rows[self.boundary_chunks, -1].tolist())

    @cached_property
    def sequences(self) -> SequenceLayout:
        """Sequences of all rounds, for one launch."""
        return self.make_sequences()

    @cached_property
    def packed_calls(self) -> PackedCalls:
        """One call per round, sequences cut where another starts from their state."""
        return self.make_packed_calls()

    @cached_property
    def node_calls(self) -> PackedCalls:
        """One call per level of segments, without replay."""
        return self.make_node_calls()
