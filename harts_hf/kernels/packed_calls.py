"""Packed calls: linear attention on a tree as a series of calls on variable-length sequences.

A call runs pieces whose initial states are known and returns their final states. Two schemes use it: `rounds` cuts at
chunk boundaries and replays, `nodewise` has one call per level of segments. Derived properties are made once per plan
and kept, so that all layers share them.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Pieces that run in one call: their initial states come from earlier calls.

    All tensors are int64 on the device of the layer's inputs.

    Attributes:
        rows (`[T]`): row of each packed token, replayed rows included.
        cu_seqlens (`[n + 1]`): offsets of the pieces in `rows`, leading 0.
        source (`[n]`): piece whose final state is this piece's initial state, counted over the pieces of all calls in
            order, always in an earlier call; -1 - i for the state above root i.
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
class PackedCalls:
    """The packed calls of a tree, in the order in which they can run.

    Attributes:
        calls (`tuple[PackedCall, ...]`): the calls.
        boundary_pieces (`tuple[int, ...]`): pieces whose final states are requested.
    """

    calls: tuple[PackedCall, ...]
    boundary_pieces: tuple[int, ...] = ()

    @cached_property
    def rows(self) -> torch.Tensor:
        """`[sum of T]`: rows of all calls, one after another."""
        return torch.cat([call.rows for call in self.calls])

    @cached_property
    def output(self) -> torch.Tensor:
        """`[C]`: position in `rows` where each row is not replayed."""
        positions = torch.empty(sum(len(call.output_rows) for call in self.calls), dtype=torch.int64)
        positions = positions.to(self.calls[0].rows.device)
        begin = 0
        for call in self.calls:
            positions[call.output_rows] = call.output_positions + begin
            begin += len(call.rows)
        return positions

    @cached_property
    def hands_over(self) -> tuple[bool, ...]:
        """Whether a final state of each call is requested or starts a later call."""
        used = {piece for call in self.calls for piece in call.sources} | set(self.boundary_pieces)
        result, begin = [], 0
        for call in self.calls:
            end = begin + len(call.sources)
            result.append(not used.isdisjoint(range(begin, end)))
            begin = end
        return tuple(result)
