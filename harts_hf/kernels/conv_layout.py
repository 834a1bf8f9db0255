"""Which rows the convolution on a prefix tree reads."""

from dataclasses import dataclass
from functools import cached_property

import torch

from .row_sums import RowSums


@dataclass(frozen=True, eq=False)
class ConvLayout:
    """Rows that a causal convolution of W taps reads.

    Attributes:
        ancestors (`[C, W]`, int64): oldest first, the row itself last; -1 before the trajectory's start.
    """

    ancestors: torch.Tensor

    @property
    def width(self) -> int:
        """W, taps."""
        return self.ancestors.shape[1]

    @cached_property
    def reads(self) -> RowSums:
        """Reads of each row: `C' * W + tap` of the reading row C'."""
        return RowSums.from_index(self.ancestors.flatten(), len(self.ancestors))
