"""Tree attention in flash-attn-4 (CuTe DSL) on Hopper: tile lists skip what is hidden, a mask cuts what is partial.

flash-attn-4 walks, per tile of queries, the lists of partial and of full tiles, and evaluates the mask in partial ones
alone; the backward walks the lists of each tile of keys. The mask reads one number per key, the size of its subtree:
k <= q < k + size[k] is a single unsigned comparison of q - k.

The sizes are passed by address, in a scalar. As an `aux_tensor` the kernels would wrap each index of each element of a
partial tile into the tensor's length, with a division, which makes the loop over partial tiles much longer. The tables
are longer than any index instead.

The gradient of the queries is added up with atomics, as in flash-attn-4's dense backward: two runs may differ in the
last bits. A sum in a fixed order is not available for tile lists on Hopper.
"""

import functools
import importlib.metadata
from typing import NamedTuple

import torch

from .attention_layout import AttentionLayout
from .attention_tiles import classify_tiles, list_tiles

FLASH4_VERSION = "4.0.0b36"
_FEWEST_ROWS = 256  # below, flash-attn-4 compiles again for a single tile


class _Tiles(NamedTuple):
    """Sizes of tiles, (queries, keys)."""

    forward: tuple[int, int]
    backward: tuple[int, int]


class _Tables(NamedTuple):
    """What the kernels read, per layout, tile sizes and window."""

    forward: tuple  # BlockSparseTensorsTorch
    backward: tuple  # BlockSparseTensorsTorch, along the queries
    scalars: tuple  # of the mask


def flash4_refusal(q: torch.Tensor, v: torch.Tensor) -> str | None:
    """Why flash-attn-4 cannot run these inputs; None if it can.

    Args:
        q: `[1, H, C, K]`.
        v: `[1, Hkv, C, V]`.
    """
    widths = (q.shape[-1], v.shape[-1])
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"flash4 takes bfloat16 or float16, not {q.dtype}"
    if any(width % 8 or not 8 <= width <= 256 for width in widths):
        return f"flash4 takes head widths from 8 to 256 in steps of 8, not {widths}"
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "flash4 runs on Hopper GPUs (compute capability 9.0)"
    if torch.are_deterministic_algorithms_enabled():
        return "flash4 adds up gradients with atomics, and deterministic algorithms are asked for"
    return None


@functools.cache
def flash4_is_installed() -> bool:
    """Whether flash-attn-4 is installed, in the version whose tiles are known here.

    Raises:
        ImportError: it is installed in another version, or does not import.
    """
    try:
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return False
    if version != FLASH4_VERSION:
        raise ImportError(
            f"tree attention runs flash-attn-4 {FLASH4_VERSION}, but {version} is installed: install that version, or "
            "remove it for FlexAttention"
        )
    _flash4()
    return True


def attend_flash4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Tree attention by flash-attn-4; see `tree_attention`.

    Args:
        q: `[1, H, C, K]`, bf16 or fp16, CUDA; without copies if it is a transposed `[1, C, H, K]`.
        k: `[1, Hkv, C, K]`.
        v: `[1, Hkv, C, V]`.

    Returns:
        `[1, C, H, V]`; behind a given prefix C counts its rows, whose queries and outputs mean nothing.

    Raises:
        ImportError: flash-attn-4 is not installed.
    """
    flash4 = _flash4()
    num_rows = q.shape[2]
    tiles = _tile_sizes(q.shape[-1], v.shape[-1])
    tables = layout.table(("flash4", tiles, window), lambda: _make_tables(layout, tiles, window))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if num_rows < _FEWEST_ROWS:
        q, k, v = (torch.nn.functional.pad(x, (0, 0, 0, 0, 0, _FEWEST_ROWS - num_rows)) for x in (q, k, v))
    output, _ = flash4.attend(
        q,
        k,
        v,
        softmax_scale=scale,
        pack_gqa=False,  # packed heads would make each tile of queries 1 / groups as long
        mask_mod=flash4.tree_mask if window is None else flash4.window_mask,
        aux_scalars=tables.scalars,
        block_sparse_tensors=tables.forward,
        block_sparse_tensors_bwd=tables.backward,
    )
    return output[:, :num_rows]


def _tile_sizes(key_dim: int, value_dim: int) -> _Tiles:
    """The tiles that `FLASH4_VERSION` runs at these widths on Hopper."""
    if key_dim <= 64:
        backward = (128, 128)
    elif key_dim <= 128:
        backward = (64, 128)
    elif key_dim <= 192:
        backward = (64, 96)
    else:
        backward = (64, 64)
    if key_dim <= 128:
        return _Tiles((128, 128), backward)
    if key_dim <= 192:
        return _Tiles((128, 128 if value_dim <= 128 else 112), backward)
    return _Tiles((128, 80), backward)


def _make_tables(layout: AttentionLayout, tiles: _Tiles, window: int | None) -> _Tables:
    end, positions = layout.padded(max(layout.num_keys, _FEWEST_ROWS))
    forward = list_tiles(*classify_tiles(end, positions, *tiles.forward, window, layout.prefix_rows))
    some, every = classify_tiles(end, positions, *tiles.backward, window, layout.prefix_rows)
    backward = list_tiles(some.t(), every.t())

    end, positions = layout.padded(len(end) + 256)  # longer than any index of a tile that reaches past the last row
    scalars = (_address(end - torch.arange(len(end), dtype=torch.int32, device=end.device)),)
    if window is not None:
        scalars += (_address(positions), _flash4().Int32(window))
    return _Tables(_block_sparse(forward, tiles.forward), _block_sparse(backward, tiles.backward), scalars)


def _block_sparse(lists, tile_sizes: tuple[int, int]):
    counts_and_lists = (x[None, None] for x in lists)  # one for all batch entries and heads
    return _flash4().BlockSparse(*counts_and_lists, block_size=tile_sizes)


def _address(table: torch.Tensor):
    """The address of a table as a scalar that keeps the table alive, as long as autograd keeps the scalar."""
    address = _flash4().Int64(table.data_ptr())
    address.table = table
    return address


class _Flash4(NamedTuple):
    """What is used of flash-attn-4 and the CuTe DSL, and the masks, which the DSL compiles from their source."""

    attend: object
    BlockSparse: type
    Int32: type
    Int64: type
    tree_mask: object
    window_mask: object


@functools.cache
def _flash4() -> _Flash4:
    try:
        import cutlass
        import cutlass.cute as cute
        from flash_attn.cute import flash_attn_func, utils
        from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    except ImportError as error:
        raise ImportError(
            "implementation 'flash4' needs flash-attn-4: pip install 'harts_hf[flash4]', and the cu13 extra of "
            "nvidia-cutlass-dsl on CUDA 13"
        ) from error

    @cute.jit
    def tree_mask(batch, head, q_row, k_row, seqlen_info, aux_tensors, aux_scalars):
        sizes = cute.make_tensor(
            cute.make_ptr(cutlass.Uint32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(1 << 30),
        )
        size = utils.scalar_to_ssa(sizes[k_row[0]], cutlass.Uint32)
        return (q_row - k_row).to(cutlass.Uint32) < size

    @cute.jit
    def window_mask(batch, head, q_row, k_row, seqlen_info, aux_tensors, aux_scalars):
        sizes = cute.make_tensor(
            cute.make_ptr(cutlass.Uint32, aux_scalars[0], cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(1 << 30),
        )
        positions = cute.make_tensor(
            cute.make_ptr(cutlass.Int32, aux_scalars[1], cute.AddressSpace.gmem, assumed_align=4),
            cute.make_layout(1 << 30),
        )
        size = utils.scalar_to_ssa(sizes[k_row[0]], cutlass.Uint32)
        distance = utils.scalar_to_ssa(positions[q_row[0]] - positions[k_row[0]], cutlass.Int32)
        reach = utils.scalar_to_ssa(aux_scalars[2], cutlass.Int32)
        return ((q_row - k_row).to(cutlass.Uint32) < size) & (distance < reach)

    return _Flash4(flash_attn_func, BlockSparseTensorsTorch, cutlass.Int32, cutlass.Int64, tree_mask, window_mask)
