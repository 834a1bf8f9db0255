"""Where the boundaries of a tree lie: the places at which the state of a linear-attention layer is handed over."""

from collections.abc import Sequence

import numpy as np

from .rounds import RoundPlan


def locate_boundaries(rounds: RoundPlan, boundary_rows: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Sequence that owns each row, and its tokens up to and with the row: a multiple of the chunk size.

    Args:
        rounds: sequences of the tree.
        boundary_rows: different rows, each the last of a full chunk, counted from the trajectory's start.

    Raises:
        ValueError: a row is not the last of a full chunk, is not in the tree, or is given twice.
    """
    rows = np.asarray(boundary_rows, dtype=np.int64)
    if len(np.unique(rows)) != len(rows):
        raise ValueError("a boundary row is given twice")
    positions = rounds.output_positions
    if len(rows) and (rows.min() < 0 or rows.max() >= len(positions)):
        raise ValueError(f"boundary rows must be among the {len(positions)} rows of the tree")
    sequence = np.searchsorted(rounds.cu_seqlens, positions[rows], side="right") - 1
    tokens = positions[rows] + 1 - rounds.cu_seqlens[sequence]
    inside = rows[tokens % rounds.chunk_size != 0]
    if len(inside):
        raise ValueError(
            f"row {inside[0]} is not the last of a chunk of {rounds.chunk_size} tokens: no boundary follows it"
        )
    return sequence, tokens
