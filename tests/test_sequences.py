"""Plans of the tree kernels: a toy kernel gives every row the value it has alone, and nothing waits forever."""

import dataclasses

import numpy as np
import pytest
import torch
from forests import random_forest, shapes
from small_forests import failures_name, small_forest
from test_rounds import run_chunkwise, values_alone

from harts_hf.kernels.row_sums import RowSums
from harts_hf.planning import sequences as planning
from harts_hf.planning.rounds import plan_rounds
from harts_hf.planning.sequences import plan_sequences
from harts_hf.tree import PrefixTree


def run_units(tree, rounds, plan, units, slots, writes):
    """Value of each row; `slots` holds the states by slot, and a state that is not there yet is a KeyError."""
    values = [None] * tree.num_rows
    for unit in units.forward_order.tolist():
        token, end = units.tokens[unit].tolist()
        state = slots[int(units.source[unit])]
        for piece in range(units.piece_offsets[unit], units.piece_offsets[unit + 1]):
            stop = min(end, token + int(units.piece_chunks[piece]) * rounds.chunk_size)
            ids = tree.token_ids[rounds.rows[token:stop]].tolist()
            piece_values, state = run_chunkwise(ids, state, rounds.chunk_size)
            for row, value in zip(plan.owned_rows[token:stop].tolist(), piece_values, strict=True):
                if row >= 0:
                    assert values[row] is None
                    values[row] = value
            token = stop
            if writes and units.piece_slots[piece] >= 0:
                slots[int(units.piece_slots[piece])] = state
        assert token == end
    return values


def check_backward(plan, longest_first):
    """Sequences in backward order never wait for a later one, but for the longest, which may wait beside them."""
    waits = [set() for _ in plan.backward_order]
    for s, w in enumerate(waits):
        for piece in range(plan.sequences.piece_offsets[s], plan.sequences.piece_offsets[s + 1]):
            slot = plan.sequences.piece_slots[piece]
            if slot >= 0:
                groups = range(plan.group_offsets[slot], plan.group_offsets[slot + 1])
                starters = np.flatnonzero(plan.sequences.source == slot).tolist()
                assert sorted(np.flatnonzero(np.isin(plan.group, groups)).tolist()) == starters
                w.update(starters)
        w.update(np.flatnonzero((plan.group == plan.group[s]) & (plan.rank_in_group == plan.rank_in_group[s] - 1)))
    for group, size in enumerate(plan.group_sizes.tolist()):
        assert sorted(plan.rank_in_group[plan.group == group].tolist()) == list(range(size))
    done = set()
    for s in plan.backward_order.tolist():
        if longest_first and s == plan.longest:
            continue
        if longest_first and waits[plan.longest] <= done:
            done.add(plan.longest)
        assert waits[s] <= done
        done.add(s)
    assert not longest_first or waits[plan.longest] <= done


def check(sequences, chunk_size, num_boundaries=2):
    tree = PrefixTree.from_sequences(sequences)
    rounds = plan_rounds(tree, chunk_size)
    ends = np.flatnonzero(tree.position_ids % chunk_size == chunk_size - 1)
    rows = np.random.default_rng(len(ends)).permutation(ends)[:num_boundaries].tolist()
    plan = plan_sequences(rounds, rows)
    alone = values_alone(tree, chunk_size)
    slots = dict.fromkeys(range(plan.num_roots), 0)
    assert run_units(tree, rounds, plan, plan.sequences, slots, writes=True) == alone
    assert sorted(slots) == list(range(plan.num_slots))
    assert run_units(tree, rounds, plan, plan.pieces, slots, writes=False) == alone
    for row, slot in zip(rows, plan.requested_slots.tolist(), strict=True):
        path = []
        at = row
        while at >= 0:
            path.append(int(tree.token_ids[at]))
            at = tree.parent[at]
        assert slots[slot] == run_chunkwise(path[::-1], 0, chunk_size)[1]
    for longest_first in (False, True):
        check_backward(plan, longest_first)
    return plan


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5])
def test_small_forests(chunk_size, monkeypatch):
    monkeypatch.setattr(planning, "MAX_GROUP", 2)
    for seed in range(300):
        sequences = small_forest(seed, max_tokens=18)
        with failures_name(seed, sequences, chunk_size=chunk_size):
            check(sequences, chunk_size)


def test_shapes_and_random_forests(monkeypatch):
    monkeypatch.setattr(planning, "MAX_GROUP", 3)
    rng = np.random.default_rng(0)
    forests = [(sequences, 64) for _, sequences in shapes(rng, vocab=50)]
    forests += [(random_forest(rng, 40, max_tokens=300, max_trajectories=40), 16) for _ in range(10)]
    num_groups = [len(check([s.tolist() for s in sequences], size).group_sizes) for sequences, size in forests]
    assert max(num_groups) > 3


def test_a_wrong_source_or_a_missing_state_is_noticed():
    sequences = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 9]]
    tree = PrefixTree.from_sequences(sequences)
    rounds = plan_rounds(tree, 4)
    plan = plan_sequences(rounds)
    wrong = dataclasses.replace(plan.sequences, source=np.zeros_like(plan.sequences.source))
    alone = values_alone(tree, 4)
    assert run_units(tree, rounds, plan, wrong, {0: 0}, writes=True) != alone
    backwards = dataclasses.replace(plan.sequences, forward_order=plan.sequences.forward_order[::-1])
    with pytest.raises(KeyError):
        run_units(tree, rounds, plan, backwards, {0: 0}, writes=True)


def test_boundary_rows_that_do_not_fit_raise():
    rounds = plan_rounds(PrefixTree.from_sequences([[1, 2, 3, 4, 5]]), 2)
    with pytest.raises(ValueError, match="row 2 is not the last of a chunk of 2 tokens"):
        plan_sequences(rounds, [1, 2])
    with pytest.raises(ValueError, match="given twice"):
        plan_sequences(rounds, [1, 1])
    with pytest.raises(ValueError, match="among the 5 rows"):
        plan_sequences(rounds, [5])


@pytest.mark.parametrize("max_part", [2, 3, 64])
def test_row_sums_add_each_value_once(max_part):
    index = torch.from_numpy(np.random.default_rng(1).integers(-1, 6, 200))
    values = torch.arange(200.0, dtype=torch.float64) + 1
    expected = torch.zeros(7, dtype=torch.float64)
    expected.index_add_(0, index[index >= 0], values[index >= 0])
    sums = RowSums.from_index(index, 7, max_part)
    assert sums.num_rows == 7 and all(int(offsets.diff().max()) <= max_part for offsets, _ in sums.stages)
    for offsets, entries in sums.stages:
        values = torch.stack([values[entries[a:b]].sum() for a, b in zip(offsets, offsets[1:], strict=False)])
    assert torch.equal(values, expected)
