"""Which tiles of the attention matrix a tree fills, without looking at its elements.

A tile is q_tile queries by k_tile keys. With the largest and the smallest subtree end of the keys of a tile, whether
any or every pair in it is visible takes one comparison, because ancestors come before their descendants: the work is
one step per row and one per tile, and the tile lists of a batch serve all its layers.
"""

from typing import NamedTuple

import torch


class TileLists(NamedTuple):
    """For each tile of one side, the tiles of the other side that it meets.

    Attributes:
        partial_counts (`[X]`, int32): tiles with visible and hidden pairs.
        partial (`[X, Y]`, int32): their numbers, ascending; what follows the count is 0.
        full_counts (`[X]`, int32): tiles of which each pair of rows is visible.
        full (`[X, Y]`, int32): as `partial`.
    """

    partial_counts: torch.Tensor
    partial: torch.Tensor
    full_counts: torch.Tensor
    full: torch.Tensor


def classify_tiles(
    subtree_end: torch.Tensor,
    position_ids: torch.Tensor,
    q_tile: int,
    k_tile: int,
    window: int | None = None,
    first_query: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether some, and whether all, pairs of each tile are visible: k <= q < subtree_end[k].

    Args:
        subtree_end, position_ids: `[p + C]` or longer, int32 or int64, of an [`AttentionLayout`].
        q_tile, k_tile: rows of a tile; the last tiles may reach past C.
        window: if given, only keys with `position[q] - position[k] < window` are visible.
        first_query: nothing is asked of the rows before it. Tiles whose queries all lie there count as hidden, but for
            those that hold keys of the same rows: kernels want a tile for each query.

    Returns:
        `[X, Y]` twice, bool, for X tiles of queries and Y tiles of keys.
        Some pairs: exact without a window. With one, a tile of several branches can be marked of which every pair is
        hidden; it is never the other way around.
        All pairs: exact. Queries past C do not count; a tile with keys past C is never full.
    """
    num_rows, device = len(subtree_end), subtree_end.device
    q_begin = torch.arange(0, num_rows, q_tile, device=device)[:, None]
    q_end = (q_begin + q_tile).clamp(max=num_rows)
    k_begin = torch.arange(0, num_rows, k_tile, device=device)
    k_end = k_begin + k_tile
    largest_end = _by_tile(subtree_end, k_tile, 0).amax(1)
    smallest_end = _by_tile(subtree_end, k_tile, num_rows).amin(1)
    # A key before the tile's first query is visible in it iff its subtree reaches that query; a key among the tile's
    # queries is visible to itself, and its subtree ends behind the first query too.
    some = (k_begin < q_end) & (largest_end > q_begin)
    every = (k_end - 1 <= q_begin) & (smallest_end >= q_end) & (k_end <= num_rows)
    if window is not None:
        far = int(1e9)
        first_q, last_q = (_by_tile(position_ids, q_tile, x) for x in (far, -1))
        first_k, last_k = (_by_tile(position_ids, k_tile, x) for x in (far, -1))
        some &= first_q.amin(1)[:, None] - last_k.amax(1) < window
        every &= last_q.amax(1)[:, None] - first_k.amin(1) < window
    is_wanted = (q_end > first_query) | (k_begin < q_end) & (k_end > q_begin)
    return some & is_wanted, every & is_wanted


def list_tiles(some: torch.Tensor, every: torch.Tensor) -> TileLists:
    """Lists along the second dim of the two masks of `classify_tiles`; transpose them for lists along the first."""
    partial_counts, partial = _compact(some & ~every)
    full_counts, full = _compact(every)
    return TileLists(partial_counts, partial, full_counts, full)


def _by_tile(values: torch.Tensor, tile: int, fill: int) -> torch.Tensor:
    """`[C]` -> `[tiles, tile]`, with `fill` behind the last row."""
    num_tiles = -(-len(values) // tile)
    padded = values.new_full((num_tiles * tile,), fill)
    padded[: len(values)] = values
    return padded.view(num_tiles, tile)


def _compact(mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many entries of each row are set, and their columns in front: `[X]` and `[X, Y]`, int32."""
    num_rows, num_columns = mask.shape
    place = torch.where(mask, mask.cumsum(1) - 1, num_columns)  # the last column takes what is dropped
    columns = torch.arange(num_columns, dtype=torch.int32, device=mask.device).expand(num_rows, -1)
    lists = torch.zeros(num_rows, num_columns + 1, dtype=torch.int32, device=mask.device)
    lists.scatter_(1, place, columns)
    return mask.sum(1, dtype=torch.int32), lists[:, :num_columns].contiguous()
