"""Tree attention in torch's FlexAttention, with the block mask made from tile lists and compiled once for all trees.

Rows are padded to a multiple of the block. The mask reads the layout's tensors, so the compiled graph depends on no
tree: torch compiles for the first number of rows, once more for any number, and then no more. FlexAttention without
compilation would make the whole C x C matrix, so on CUDA that raises. On the CPU, where FlexAttention has no backward,
it is what runs, for tests of the mask.
"""

import functools

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .attention_layout import AttentionLayout
from .attention_tiles import classify_tiles, list_tiles

FLEX_NARROWEST = 16  # head width that FlexAttention's kernels take at least
_BLOCK = 128
_FEWEST_ROWS = 2 * _BLOCK  # torch compiles again for a dim of size 1
_MOST_COMPILATIONS = 64  # of one process, for all head widths, dtypes and windows; torch's own limit is 8


def attend_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Tree attention by FlexAttention; see `tree_attention`.

    Args:
        q: `[1, H, C, K]`.
        k: `[1, Hkv, C, K]`.
        v: `[1, Hkv, C, V]`.

    Returns:
        `[1, C, H, V]`, contiguous; behind a given prefix C counts its rows, whose queries and outputs mean nothing.

    Raises:
        RuntimeError: compilation is switched off, on CUDA.
    """
    num_rows = q.shape[2]
    block_mask = layout.table(("flex", window), lambda: _make_block_mask(layout, window))
    padding = block_mask.seq_lengths[0] - num_rows
    if padding:
        q, k, v = (F.pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    if q.is_cuda:
        with torch._dynamo.config.patch(recompile_limit=_MOST_COMPILATIONS):  # beyond it raises: fullgraph
            output = _compiled()(q, k, v, block_mask, scale, grouped)
    else:
        output = flex_attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped)
    return output[:, :, :num_rows].transpose(1, 2).contiguous()


def _make_block_mask(layout: AttentionLayout, window: int | None) -> BlockMask:
    length = max(-(-layout.num_keys // _BLOCK) * _BLOCK, _FEWEST_ROWS)
    end, positions = layout.padded(length)
    reach = torch.tensor(window or 0, dtype=torch.int32, device=end.device)  # a number would be compiled in

    def visible(batch, head, q_row, k_row):
        return (k_row <= q_row) & (q_row < end[k_row])

    def visible_in_window(batch, head, q_row, k_row):
        return visible(batch, head, q_row, k_row) & (positions[q_row] - positions[k_row] < reach)

    lists = list_tiles(*classify_tiles(end, positions, _BLOCK, _BLOCK, window, layout.prefix_rows))
    counts_and_lists = (x[None, None] for x in lists)  # one for all batch entries and heads
    return BlockMask.from_kv_blocks(
        *counts_and_lists,
        BLOCK_SIZE=_BLOCK,
        mask_mod=visible if window is None else visible_in_window,
        seq_lengths=(length, length),
    )


@functools.cache
def _compiled():
    return torch.compile(_attend, fullgraph=True)


def _attend(q, k, v, block_mask, scale: float, grouped: bool) -> torch.Tensor:
    if not torch.compiler.is_compiling():
        raise RuntimeError(
            "implementation 'flex' needs torch.compile, which is switched off here: FlexAttention would make a matrix "
            f"of {q.shape[2]} x {k.shape[2]} scores per head"
        )
    return flex_attention(q, k, v, block_mask=block_mask, scale=scale, enable_gqa=grouped)
