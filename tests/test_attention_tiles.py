"""Tile lists and paths against the dense mask, element by element."""

import numpy as np
import pytest
import torch
from forests import random_forest, shapes

from harts_hf.batch import CompactBatch
from harts_hf.kernels.attention_layout import AttentionLayout
from harts_hf.kernels.attention_paths import attention_paths
from harts_hf.kernels.attention_tiles import classify_tiles, list_tiles
from harts_hf.tree import PrefixTree

VOCAB = 50
SHAPES = dict(shapes(np.random.default_rng(0), VOCAB))
TILES = [(128, 128), (64, 96), (128, 80), (80, 128), (1, 1), (7, 3)]


def sequences_of(num_rows: int) -> list[np.ndarray]:
    """A tree of exactly `num_rows` rows: a trunk with branches of odd lengths."""
    rng = np.random.default_rng(num_rows)
    trunk = rng.integers(2, VOCAB, max(1, num_rows // 3))
    sequences, rows = [trunk], len(trunk)
    while rows < num_rows:
        length = min(int(rng.integers(1, 90)), num_rows - rows)
        branch = VOCAB + len(sequences) * 1000 + rng.integers(2, VOCAB, length)  # tokens of its own: a fork
        sequences.append(np.concatenate([trunk[: int(rng.integers(1, len(trunk) + 1))], branch]))
        rows += length
    return sequences


def layout_of(sequences) -> AttentionLayout:
    return CompactBatch(PrefixTree.from_sequences(sequences)).attention_layout()


def by_brute_force(layout, q_tile, k_tile, window):
    """Of each tile whether some, and whether all, pairs are visible; keys past C are hidden, queries not counted."""
    visible = layout.dense_mask(window)[0, 0]
    rows = layout.num_rows
    num_q, num_k = -(-rows // q_tile), -(-rows // k_tile)
    some, every = torch.zeros(num_q, num_k, dtype=torch.bool), torch.zeros(num_q, num_k, dtype=torch.bool)
    for i in range(num_q):
        for j in range(num_k):
            tile = visible[i * q_tile : (i + 1) * q_tile, j * k_tile : (j + 1) * k_tile]
            some[i, j] = tile.any()
            every[i, j] = tile.all() and tile.shape[1] == k_tile
    return some, every


def check(layout, q_tile, k_tile, window):
    some, every = classify_tiles(layout.subtree_end, layout.position_ids, q_tile, k_tile, window)
    expected_some, expected_every = by_brute_force(layout, q_tile, k_tile, window)
    assert torch.equal(every, expected_every)
    if window is None:
        assert torch.equal(some, expected_some)
    else:
        assert not (expected_some & ~some).any()


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_tiles_of_every_shape(shape, tile):
    layout = layout_of(SHAPES[shape])
    if min(tile) == 1 and layout.num_rows > 150:
        pytest.skip("brute force over single elements takes long")
    for window in (None, 1, 30):
        check(layout, *tile, window)


@pytest.mark.parametrize("num_rows", [1, 127, 128, 129, 1025])
def test_tiles_at_awkward_numbers_of_rows(num_rows):
    layout = layout_of(sequences_of(num_rows))
    assert layout.num_rows == num_rows
    for q_tile, k_tile in ((128, 128), (64, 96), (64, 128)):
        for window in (None, 100):
            check(layout, q_tile, k_tile, window)


@pytest.mark.parametrize("seed", range(10))
def test_tiles_of_random_forests(seed):
    rng = np.random.default_rng(seed)
    layout = layout_of(random_forest(rng, VOCAB, max_tokens=300, max_trajectories=12))
    check(layout, *TILES[seed % 4], (None, 1, 40)[seed % 3])
    check(layout, 16, 8, (None, 1, 40)[seed % 3])


@pytest.mark.parametrize("first_query", [1, 63, 64, 200, 299])
@pytest.mark.parametrize("q_tile, k_tile", [(64, 64), (64, 96), (128, 32)])
def test_tiles_of_queries_that_nothing_is_asked_of(first_query, q_tile, k_tile):
    """Tiles with a wanted query are as without a prefix; the others keep their own rows alone."""
    layout = layout_of(sequences_of(300))
    tiles = layout.subtree_end, layout.position_ids, q_tile, k_tile
    every_query = classify_tiles(*tiles)
    for wanted, mask in zip(classify_tiles(*tiles, first_query=first_query), every_query, strict=True):
        for i, row in enumerate(mask):
            rows = torch.arange(len(row)) * k_tile
            own = (rows < (i + 1) * q_tile) & (rows + k_tile > i * q_tile)
            assert torch.equal(wanted[i], row if (i + 1) * q_tile > first_query else row & own)


def test_a_window_hides_tiles_of_a_chain():
    """A lower bound on what is listed would be of no use if it hid nothing: on one chain it is exact."""
    layout = layout_of([np.random.default_rng(0).integers(2, VOCAB, 1000)])
    some, every = classify_tiles(layout.subtree_end, layout.position_ids, 64, 32, 100)
    expected_some, expected_every = by_brute_force(layout, 64, 32, 100)
    assert torch.equal(some, expected_some) and torch.equal(every, expected_every)


def test_lists_name_the_marked_tiles_in_order():
    generator = torch.Generator().manual_seed(0)
    kind = torch.randint(0, 3, (20, 31), generator=generator)
    kind[4], kind[5], kind[6] = 0, 1, 2
    some, every = kind > 0, kind > 1
    for mask_some, mask_every in ((some, every), (some.t(), every.t())):
        lists = list_tiles(mask_some, mask_every)
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in lists)
        for row in range(len(mask_some)):
            partial = (mask_some & ~mask_every)[row].nonzero()[:, 0]
            full = mask_every[row].nonzero()[:, 0]
            assert lists.partial[row, : lists.partial_counts[row]].tolist() == partial.tolist()
            assert lists.full[row, : lists.full_counts[row]].tolist() == full.tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_paths_hold_each_rows_ancestors(shape):
    layout = layout_of(SHAPES[shape])
    paths = attention_paths(layout)
    assert paths is attention_paths(layout)
    visible = layout.dense_mask()[0, 0]
    cu_q, cu_k = paths.cu_seqlens_q.tolist(), paths.cu_seqlens_k.tolist()
    assert cu_q[0] == cu_k[0] == 0 and cu_q[-1] == layout.num_rows and cu_k[-1] == len(paths.key_rows)
    for i in range(len(cu_q) - 1):
        keys = paths.key_rows[cu_k[i] : cu_k[i + 1]]
        for row in range(cu_q[i], cu_q[i + 1]):  # aligned at the last query and key
            own = keys[: len(keys) - (cu_q[i + 1] - 1 - row)]
            assert own.tolist() == visible[row].nonzero()[:, 0].tolist()
    assert paths.longest_q == max(np.diff(cu_q)) and paths.longest_k == max(np.diff(cu_k))


def test_padded_rows_see_themselves_alone():
    layout = layout_of(SHAPES["two-level"])
    end, positions = layout.padded(layout.num_rows + 9)
    mask = AttentionLayout(end.long(), positions.long()).dense_mask()[0, 0]
    assert torch.equal(mask[: layout.num_rows, : layout.num_rows], layout.dense_mask()[0, 0])
    assert not mask[: layout.num_rows, layout.num_rows :].any()
    assert torch.equal(mask[layout.num_rows :].nonzero()[:, 1], torch.arange(layout.num_rows, layout.num_rows + 9))
