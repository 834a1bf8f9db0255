"""Rounds, chunks and packed calls: fewest rounds, least replay, and the arithmetic of every trajectory alone."""

import dataclasses
import itertools
import time

import numpy as np
import pytest
from forests import random_forest, shapes
from small_forests import all_tiny_forests, failures_name, small_forest

from harts_hf.planning.chunks import plan_chunks
from harts_hf.planning.packed_calls import plan_packed_calls
from harts_hf.planning.rounds import plan_rounds
from harts_hf.tree import PrefixTree

# ---------------------------------------------------------------------------------------------------------------------
# Brute force over the prefixes themselves
# ---------------------------------------------------------------------------------------------------------------------


def children_by_prefix(sequences):
    """prefix -> its children, one token longer; the empty prefix is the virtual fork."""
    children = {(): set()}
    for s in sequences:
        for n in range(1, len(s) + 1):
            children.setdefault(tuple(s[:n]), set())
            children[tuple(s[: n - 1])].add(tuple(s[:n]))
    return {prefix: sorted(after) for prefix, after in children.items()}


def rounds_of_every_choice(children, chunk_size):
    """Number of rounds for each way to choose, at every fork, the child that continues its parent's sequence."""
    forks = [p for p in children if p and len(children[p]) >= 2]
    for choice in itertools.product(*(children[p] for p in forks)):
        continues = set(choice)
        last = 0
        stack = [(child, 0, 0) for child in children[()]]  # prefix, round and start of the sequence that holds it
        while stack:
            prefix, round_, start = stack.pop()
            last = max(last, round_)
            after = children[prefix]
            boundary = len(prefix) - len(prefix) % chunk_size
            for child in after:
                if len(after) == 1 or child in continues:
                    stack.append((child, round_, start))
                else:
                    stack.append((child, round_ + (start < boundary), boundary))
        yield last + 1


def replay_of_forks(children, chunk_size):
    """Sum over forks of (children - 1) * (fork position mod B)."""
    return sum((len(after) - 1) * (len(p) % chunk_size) for p, after in children.items() if after)


# ---------------------------------------------------------------------------------------------------------------------
# A toy chunkwise kernel: exact integers, and every value depends on where the chunks lie
# ---------------------------------------------------------------------------------------------------------------------

MODULUS = (1 << 61) - 1


def run_chunkwise(tokens, state, chunk_size):
    """Value of each token, and the state after the last: `state` changes only at the end of a full chunk."""
    values = []
    inside = 0
    for k, token in enumerate(tokens):
        inside = (inside * 1_000_003 + token * 31 + k % chunk_size + 1) % MODULUS
        values.append((state * 7919 + inside) % MODULUS)
        if k % chunk_size == chunk_size - 1:
            state, inside = values[-1] * 65_537 % MODULUS, 0
    return values, state


def values_alone(tree, chunk_size):
    """Value of each row when each trajectory runs alone; trajectories must agree on shared rows."""
    values = {}
    for i in range(tree.num_trajectories):
        rows = tree.rows(i)
        alone, _ = run_chunkwise(tree.token_ids[rows].tolist(), 0, chunk_size)
        for row, value in zip(rows.tolist(), alone, strict=True):
            assert values.setdefault(row, value) == value
    return [values[row] for row in range(tree.num_rows)]


def values_of_chunks(tree, plan):
    tokens = tree.token_ids
    slots, end_states = [], []
    for rows, parent in zip(plan.rows, plan.parent.tolist(), strict=True):
        state = 0 if parent < 0 else end_states[parent]
        held = rows[rows >= 0]
        values, end_state = run_chunkwise(tokens[held].tolist(), state, plan.chunk_size)
        slots += values + [None] * (plan.chunk_size - len(held))
        end_states.append(end_state)
    return [slots[slot] for slot in plan.output_slot.tolist()]


def values_of_calls(tree, calls, chunk_size):
    final_states = []
    outputs = {}
    for call in calls:
        states = [
            0 if source < 0 else final_states[source] for source in call.source.tolist()
        ]  # known before the call
        values = []
        for begin, end, state in zip(call.cu_seqlens[:-1], call.cu_seqlens[1:], states, strict=True):
            piece, final = run_chunkwise(tree.token_ids[call.rows[begin:end]].tolist(), state, chunk_size)
            values += piece
            final_states.append(final)
        for position, row in zip(call.output_positions.tolist(), call.output_rows.tolist(), strict=True):
            assert row not in outputs
            outputs[row] = values[position]
    return [outputs[row] for row in range(tree.num_rows)]


# ---------------------------------------------------------------------------------------------------------------------
# Properties
# ---------------------------------------------------------------------------------------------------------------------


def check_rounds(tree, plan):
    """What a RoundPlan promises, apart from the number of rounds."""
    size = plan.chunk_size
    sequences = plan.sequences
    assert len(sequences) == plan.num_sequences
    owned = np.concatenate([s.rows[s.replay :] for s in sequences])
    assert sorted(owned.tolist()) == list(range(tree.num_rows))
    np.testing.assert_array_equal(plan.rows[~plan.is_replayed], owned)
    assert plan.replay_tokens == sum(s.replay for s in sequences) == len(plan.rows) - tree.num_rows
    order = [(s.round, s.rows[s.replay]) for s in sequences]
    assert order == sorted(order)
    assert plan.num_rounds == 1 + max(s.round for s in sequences)
    assert {s.round for s in sequences} == set(range(plan.num_rounds))
    assert 2 ** (plan.num_rounds - 1) <= plan.num_sequences  # the continuing child has the most rounds below it

    path = [()] * tree.num_rows  # row -> the rows from its root to it
    for row, parent in enumerate(tree.parent.tolist()):
        path[row] = (*(path[parent] if parent >= 0 else ()), row)
    ran = []  # sequence -> the rows that its states have seen, from a root to its end
    for i, s in enumerate(sequences):
        assert 0 <= s.replay < size
        assert s.start % size == 0
        assert (s.source == -1) == (s.start == 0)
        assert len(s.rows) > s.replay
        state = ()
        if s.source >= 0:
            source = sequences[s.source]
            assert s.source < i and source.round < s.round
            assert source.start < s.start < source.start + len(source.rows)
            state = ran[s.source][: s.start]
        assert len(state) == s.start
        ran.append(state + tuple(s.rows.tolist()))
        assert ran[-1] == path[s.rows[-1]]


def check_chunks(tree, rounds, plan):
    size = plan.chunk_size
    assert plan.rows.shape == (plan.num_chunks, size)
    held = plan.rows >= 0
    assert (held[:, :-1] >= held[:, 1:]).all() and held[:, 0].all()  # padding only at the end
    np.testing.assert_array_equal(plan.rows.ravel()[plan.output_slot], np.arange(tree.num_rows))
    assert sorted(plan.rows[held].tolist()) == sorted(rounds.rows.tolist())
    level = tree.position_ids[plan.rows[:, 0]] // size
    assert (tree.position_ids[plan.rows[:, 0]] % size == 0).all()
    assert plan.level_offsets[0] == 0 and plan.level_offsets[-1] == plan.num_chunks
    for chunk in range(plan.num_chunks):
        parent = plan.parent[chunk]
        offsets = plan.level_offsets[level[chunk] : level[chunk] + 2]
        assert offsets[0] <= chunk < offsets[1]
        assert (parent == -1) == (level[chunk] == 0)
        if parent >= 0:
            assert level[parent] == level[chunk] - 1
            assert plan.rows[parent, -1] == tree.parent[plan.rows[chunk, 0]]  # a full chunk, on the path


def check_calls(tree, rounds, calls):
    assert len(calls) >= rounds.num_rounds
    assert sorted(np.concatenate([c.output_rows for c in calls]).tolist()) == list(range(tree.num_rows))
    assert sum(len(c.rows) for c in calls) == len(rounds.rows)
    call_of_piece = []
    for k, call in enumerate(calls):
        assert call.cu_seqlens[0] == 0 and call.cu_seqlens[-1] == len(call.rows)
        assert (np.diff(call.cu_seqlens) > 0).all()
        np.testing.assert_array_equal(call.rows[call.output_positions], call.output_rows)
        assert [call_of_piece[source] if source >= 0 else -1 for source in call.source] == [k - 1] * len(call.source)
        roots = np.flatnonzero(tree.parent < 0)
        for begin, source in zip(call.cu_seqlens, call.source, strict=False):
            assert source >= 0 or call.rows[begin] == roots[-1 - source]
        call_of_piece += [k] * len(call.source)


def check_everything(sequences, chunk_size):
    """All properties of all plans; returns the fewest and the most rounds over all choices of continuing children."""
    tree = PrefixTree.from_sequences(sequences)
    rounds = plan_rounds(tree, chunk_size)
    chunks = plan_chunks(rounds)
    calls = plan_packed_calls(rounds).calls
    children = children_by_prefix(sequences)
    choices = set(rounds_of_every_choice(children, chunk_size))
    assert rounds.num_rounds == min(choices)
    assert rounds.replay_tokens == replay_of_forks(children, chunk_size)
    check_rounds(tree, rounds)
    check_chunks(tree, rounds, chunks)
    check_calls(tree, rounds, calls)
    alone = values_alone(tree, chunk_size)
    assert values_of_chunks(tree, chunks) == alone
    assert values_of_calls(tree, calls, chunk_size) == alone
    return min(choices), max(choices)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5])
@pytest.mark.parametrize("block", range(4))
def test_random_forests(block, chunk_size):
    for seed in range(500 * block, 500 * (block + 1)):
        sequences = small_forest(seed, max_tokens=18)
        with failures_name(seed, sequences, chunk_size=chunk_size):
            check_everything(sequences, chunk_size)


def test_the_choice_of_the_continuing_child_matters_in_these_tests():
    outcomes = [check_everything(small_forest(seed, max_tokens=18), 2) for seed in range(500)]
    assert sum(fewest < most for fewest, most in outcomes) > 50
    assert max(fewest for fewest, _ in outcomes) >= 3


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_all_tiny_forests(chunk_size):
    for sequences in all_tiny_forests(max_tokens=3, max_trajectories=3):
        with failures_name(None, sequences, chunk_size=chunk_size):
            check_everything(sequences, chunk_size)


def test_shapes_at_the_kernels_chunk_size():
    for name, sequences in shapes(np.random.default_rng(0), vocab=50):
        with failures_name(0, name):
            sequences = [s.tolist() for s in sequences]
            tree = PrefixTree.from_sequences(sequences)
            rounds = plan_rounds(tree)
            assert rounds.replay_tokens == replay_of_forks(children_by_prefix(sequences), 64)
            check_rounds(tree, rounds)
            check_chunks(tree, rounds, plan_chunks(rounds))
            check_calls(tree, rounds, plan_packed_calls(rounds).calls)
            alone = values_alone(tree, 64)
            assert values_of_chunks(tree, plan_chunks(rounds)) == alone
            assert values_of_calls(tree, plan_packed_calls(rounds).calls, 64) == alone


def test_forests_with_many_forks_on_long_paths():
    for seed in range(15):
        rng = np.random.default_rng(seed)
        sequences = [s.tolist() for s in random_forest(rng, 40, max_tokens=300, max_trajectories=40)]
        with failures_name(seed, sequences):
            tree = PrefixTree.from_sequences(sequences)
            rounds = plan_rounds(tree, 16)
            check_rounds(tree, rounds)
            alone = values_alone(tree, 16)
            assert values_of_chunks(tree, plan_chunks(rounds)) == alone
            assert values_of_calls(tree, plan_packed_calls(rounds).calls, 16) == alone


def test_a_binary_tree_takes_a_round_per_level():
    """Forks at chunk boundaries: no state is known early, both children are equal, so each level adds a round."""
    sequences = [sum(([bit, 2] for bit in bits), []) for bits in itertools.product((0, 1), repeat=5)]
    rounds = plan_rounds(PrefixTree.from_sequences(sequences), chunk_size=2)
    assert rounds.num_rounds == 5  # the roots are two already
    assert rounds.replay_tokens == 0
    assert plan_rounds(PrefixTree.from_sequences(sequences), chunk_size=64).num_rounds == 1


def test_without_replay_or_with_shifted_chunks_the_values_differ():
    """The toy kernel notices a wrong plan: a branch that starts at its fork, and one from another chunk's state."""
    tree = PrefixTree.from_sequences([[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 5, 8, 9]])
    plan = plan_rounds(tree, 4)
    assert plan.replay.tolist() == [0, 1]
    alone = values_alone(tree, 4)
    assert values_of_calls(tree, plan_packed_calls(plan).calls, 4) == alone

    kept = ~plan.is_replayed
    no_replay = dataclasses.replace(
        plan, rows=plan.rows[kept], cu_seqlens=plan.cu_seqlens - [0, 0, 1], replay=np.array([0, 0])
    )
    assert values_of_calls(tree, plan_packed_calls(no_replay).calls, 4) != alone
    chunks = plan_chunks(plan)
    wrong_parent = dataclasses.replace(chunks, parent=np.full_like(chunks.parent, -1))
    assert values_of_chunks(tree, wrong_parent) != alone


def test_one_trajectory_is_one_sequence():
    rounds = plan_rounds(PrefixTree.from_sequences([[5, 6, 7], [5, 6], [5, 6, 7]]), chunk_size=2)
    (only,) = rounds.sequences
    assert (only.round, only.replay, only.source, only.start) == (0, 0, -1, 0)
    assert only.rows.tolist() == [0, 1, 2]
    assert plan_chunks(rounds).rows.tolist() == [[0, 1], [2, -1]]
    (call,) = plan_packed_calls(rounds).calls
    assert call.rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("chunk_size", [0, -64])
def test_a_chunk_holds_at_least_a_token(chunk_size):
    with pytest.raises(ValueError, match=f"chunk_size must be at least 1, got {chunk_size}"):
        plan_rounds(PrefixTree.from_sequences([[1]]), chunk_size)


# ---------------------------------------------------------------------------------------------------------------------
# Scale
# ---------------------------------------------------------------------------------------------------------------------


def plan_all(sequences):
    """Tree, rounds, chunks and calls, and the seconds that all plans took without the tree."""
    tree = PrefixTree.from_sequences(sequences)
    start = time.perf_counter()
    rounds = plan_rounds(tree)
    chunks = plan_chunks(rounds)
    calls = plan_packed_calls(rounds).calls
    return tree, rounds, chunks, calls, time.perf_counter() - start


def test_a_chain_with_5000_side_branches():
    chain = np.arange(5001) % 1000
    branches = [np.append(chain[:n], 1000) for n in range(1, 5001)]
    tree, rounds, chunks, calls, seconds = plan_all([chain, *branches])
    assert tree.num_rows == 10_001
    assert rounds.num_rounds == 2
    assert rounds.replay_tokens == sum(n % 64 for n in range(1, 5001))
    assert chunks.num_levels == -(-5001 // 64)
    assert len(calls) == 5000 // 64 + 1
    check_calls(tree, rounds, calls)
    assert seconds < 1.0


def test_a_chain_of_100000_tokens():
    tree, rounds, chunks, calls, seconds = plan_all([np.arange(100_000) % 1000])
    assert (rounds.num_rounds, rounds.num_sequences, len(calls), chunks.num_chunks) == (1, 1, 1, 1563)
    assert seconds < 1.0


@pytest.mark.parametrize("position", [0, 63, 64, 65])
def test_70000_one_token_branches(position):
    trunk = np.arange(position)
    tree, rounds, chunks, calls, seconds = plan_all([np.append(trunk, 1000 + k) for k in range(70_000)])
    assert rounds.num_rounds == (1 if position < 64 else 2)
    assert rounds.replay_tokens == (70_000 - 1) * (position % 64)
    check_calls(tree, rounds, calls)
    assert seconds < 3.0
