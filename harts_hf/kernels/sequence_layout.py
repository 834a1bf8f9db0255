"""SequenceLayout: the index tensors by which the tree kernels run all sequences of a tree in one launch.

Packed tokens are the rows of all sequences, one sequence after another, replayed rows included. A slot holds the
fp32 state at a boundary; slots of the roots' initial states come first.
"""

from dataclasses import dataclass
from functools import cached_property

import torch

from .row_sums import RowSums


@dataclass(frozen=True, eq=False)
class Units:
    """What one program each runs: sequences, or pieces of them. All tensors are int64 on the inputs' device.

    Attributes:
        forward_order (`[U]`): units in the order in which they start; a unit's source comes before it.
        tokens (`[U, 2]`): first packed token, and one past the last.
        first_chunk (`[U]`): chunk of the first token.
        source (`[U]`): slot whose state the unit starts from.
        piece_offsets (`[U + 1]`): pieces of each unit.
        piece_chunks (`[P]`): chunks of each piece.
        piece_slots (`[P]`): slot that takes the state at the piece's end; -1 for none.
    """

    forward_order: torch.Tensor
    tokens: torch.Tensor
    first_chunk: torch.Tensor
    source: torch.Tensor
    piece_offsets: torch.Tensor
    piece_chunks: torch.Tensor
    piece_slots: torch.Tensor

    @property
    def num_units(self) -> int:
        """U."""
        return len(self.first_chunk)


@dataclass(frozen=True, eq=False)
class SequenceLayout:
    """All sequences of a tree. All tensors are int64 on the inputs' device.

    Attributes:
        chunk_size (`int`): B, in tokens.
        num_roots (`int`): slots that stand for the states above the roots, in row order.
        num_slots (`int`): roots and boundaries.
        num_groups (`int`): accumulators of state gradients.
        num_root_groups (`int`): those of the roots, which come before the others.
        rows (`[T]`): row of each packed token.
        owned_rows (`[T]`): the same; -1 where the token is replayed.
        output_positions (`[C]`): packed token that each row is not replayed at.
        cu_seqlens (`[N + 1]`): offsets of the sequences among the packed tokens.
        chunk_indices (`[num_chunks, 2]`): sequence, and number in the sequence, of each chunk.
        sequences, pieces (`Units`): one unit per sequence; one per piece.
        group_offsets (`[num_slots + 1]`): groups of each slot.
        group_sizes (`[num_groups]`): sequences of each group.
        group, rank_in_group (`[N]`): group of each sequence, and its turn there.
        topological_order (`[N]`): backward, whatever a sequence waits for comes before it.
        longest (`int`): the sequence with most tokens.
        longest_tokens (`int`): its tokens.
        request (`[num_slots]`): index of each slot among the requested states; -1 for none.
        requested_slots (`[M]`): slots of the requested states.
    """

    chunk_size: int
    num_roots: int
    num_slots: int
    num_groups: int
    num_root_groups: int
    rows: torch.Tensor
    owned_rows: torch.Tensor
    output_positions: torch.Tensor
    cu_seqlens: torch.Tensor
    chunk_indices: torch.Tensor
    sequences: Units
    pieces: Units
    group_offsets: torch.Tensor
    group_sizes: torch.Tensor
    group: torch.Tensor
    rank_in_group: torch.Tensor
    topological_order: torch.Tensor
    longest: int
    longest_tokens: int
    request: torch.Tensor
    requested_slots: torch.Tensor

    @property
    def num_chunks(self) -> int:
        """Chunks of all sequences."""
        return len(self.chunk_indices)

    def backward_order(self, longest_first: bool) -> torch.Tensor:
        """`[N]`: sequences in the order in which the backward kernel starts them.

        Args:
            longest_first: the longest sequence starts first and runs beside those that it waits for. They must find
                room on the device, or nothing advances.
        """
        return self._longest_first if longest_first else self.topological_order

    @cached_property
    def _longest_first(self) -> torch.Tensor:
        others = self.topological_order[self.topological_order != self.longest]
        return torch.cat([others.new_tensor([self.longest]), others])

    @cached_property
    def root_sums(self) -> RowSums:
        """Groups of each root."""
        groups = torch.arange(self.num_root_groups, device=self.group_offsets.device)
        return RowSums(self.num_roots, ((self.group_offsets[: self.num_roots + 1], groups),))

    @cached_property
    def sums(self) -> RowSums:
        """Packed tokens of each row, replays included."""
        return RowSums.from_index(self.rows, len(self.output_positions))

    @cached_property
    def owned_sums(self) -> RowSums:
        """The packed token of each row that is not replayed."""
        offsets = torch.arange(len(self.output_positions) + 1, device=self.output_positions.device)
        return RowSums(len(self.output_positions), ((offsets, self.output_positions),))
