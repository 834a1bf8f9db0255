"""RowSums: which values add up to each row, as lists that a kernel walks in a fixed order.

The gradient of a row is the sum over its reads. A row at a wide fork is read by thousands of branches, so a long list
is cut into parts, the parts' sums are added by a second stage, and so on: the order is fixed and no program walks a
long list.
"""

from dataclasses import dataclass

import torch

MAX_PART = 64  # entries of a part: one stage for all but very wide forks


@dataclass(frozen=True, eq=False)
class RowSums:
    """Stages of a segmented sum. Tensors are int64 on one device.

    Attributes:
        num_rows (`int`): rows that the last stage writes.
        stages (`tuple[tuple[torch.Tensor, torch.Tensor], ...]`): offsets `[n + 1]` and entries `[m]` of each stage:
            result `i` is the sum of the values at `entries[offsets[i] : offsets[i + 1]]`, in this order. Values of the
            first stage are the caller's, those of a later stage the results of the stage before.
    """

    num_rows: int
    stages: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @classmethod
    def from_index(cls, index: torch.Tensor, num_rows: int, max_part: int = MAX_PART) -> "RowSums":
        """Sums of the values whose `index` is the same, in the order of the values.

        Args:
            index: `[M]`, int64: row to which each value adds; a value at a negative index is dropped.
            num_rows: C.
            max_part: longest list that one program walks.
        """
        kept = torch.nonzero(index >= 0).flatten()
        entries = kept[torch.argsort(index[kept], stable=True)]
        lengths = torch.bincount(index[kept], minlength=num_rows)
        stages = []
        while True:
            offsets = _offsets(lengths)
            if len(entries) == 0 or int(lengths.max()) <= max_part:
                stages.append((offsets, entries))
                return cls(num_rows, tuple(stages))
            parts = (lengths + max_part - 1) // max_part
            part_offsets = _offsets(parts)
            row = torch.repeat_interleave(torch.arange(len(lengths), device=index.device), parts)
            number = torch.arange(len(row), device=index.device) - part_offsets[row]  # of the part in its row
            begins = offsets[row] + number * max_part
            stages.append((torch.cat([begins, offsets[-1:]]), entries))
            lengths, entries = parts, torch.arange(len(row), device=index.device)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64, device=lengths.device)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets
