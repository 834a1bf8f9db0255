"""Which rows each row of a prefix tree may attend to, and the tables that attention backends derive from it."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

Table = TypeVar("Table")


@dataclass(frozen=True, eq=False)
class AttentionLayout:
    """Row k is visible to row q iff k <= q < subtree_end[k]. All layers, and recomputation, share one layout.

    Keys are p rows that are given and the C rows that are computed; queries are the latter.

    Attributes:
        subtree_end (`[p + C]`, int64): one past the last row of each row's subtree.
        position_ids (`[p + C]`, int64): distance from the trajectory's start, in tokens.
        prefix_rows (`int`): p, 0 for a tree that is computed as a whole.
    """

    subtree_end: torch.Tensor
    position_ids: torch.Tensor
    prefix_rows: int = 0
    _tables: dict[Hashable, object] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_rows(self) -> int:
        """C, the queries."""
        return len(self.subtree_end) - self.prefix_rows

    @property
    def num_keys(self) -> int:
        """p + C."""
        return len(self.subtree_end)

    def table(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """What `make` returned at the first call with this key: a backend's tables are made on first use and kept."""
        if key not in self._tables:
            self._tables[key] = make()
        return self._tables[key]  # pyright: ignore[reportReturnType]: of the type that `make` of this key returns

    def dense_mask(self, window: int | None = None, dtype: torch.dtype = torch.bool) -> torch.Tensor:
        """Mask of queries (dim 2) against keys (dim 3).

        Args:
            window: if given, row q sees only keys with `position[q] - position[k] < window`, itself included: the
                sliding window of Transformers, in positions of the trajectory.
            dtype: `torch.bool`, True where visible; or a floating dtype, 0 where visible and -inf elsewhere.

        Returns:
            `[1, 1, C, p + C]`, the same tensor on each call.
        """
        return self.table(("dense_mask", window, dtype), lambda: self._dense_mask(window, dtype))

    def _dense_mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        keys = torch.arange(self.num_keys, device=self.subtree_end.device)
        rows = keys[self.prefix_rows :]
        visible = (keys[None, :] <= rows[:, None]) & (rows[:, None] < self.subtree_end[None, :])
        if window is not None:
            visible &= self.position_ids[self.prefix_rows :, None] - self.position_ids[None, :] < window
        if dtype != torch.bool:
            visible = torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, float("-inf"))
        return visible[None, None]

    def padded(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`subtree_end` and `position_ids` as `[length]`, int32; rows past p + C see themselves alone, at
        position 0."""
        return self.table(("padded", length), lambda: self._padded(length))

    def _padded(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = torch.arange(1, length + 1, dtype=torch.int32, device=self.subtree_end.device)
        positions = torch.zeros_like(end)
        end[: self.num_keys] = self.subtree_end
        positions[: self.num_keys] = self.position_ids
        return end, positions
