"""plan_rounds: a prefix tree -> the sequences that linear attention runs, with the fewest rounds and the fixed replay.

A chunkwise kernel keeps a trajectory's arithmetic only if its chunks lie where they lie when the trajectory runs
alone: at multiples of the chunk size B, counted from the trajectory's start. A branch therefore starts at the last
chunk boundary at or before its fork and replays the fewer than B rows in between; the state at that boundary comes
from another sequence. Which child of a fork continues its parent's sequence decides how many rounds there are, not how
much is replayed. Planning is linear in rows plus replay, and its Python loops run over chains between forks, never
over tokens. The number of rounds is the global minimum, which tests check by brute force.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from harts_hf.tree import RowForest


@dataclass(frozen=True, eq=False)
class RoundSequence:
    """One sequence of a plan: a path of rows that starts from a known state.

    Attributes:
        round (`int`): round in which the sequence runs, 0 for those that start from the zero state.
        rows (`np.ndarray` of shape `[T]`, int64): rows in path order, replayed rows first.
        replay (`int`): number of replayed rows, less than the chunk size; the rows after them are owned.
        source (`int`): index of the sequence whose state at `start` this one takes over; -1 for the zero state.
        start (`int`): position of `rows[0]`, in tokens, a multiple of the chunk size; 0 iff `source` is -1.
    """

    round: int
    rows: np.ndarray
    replay: int
    source: int
    start: int


@dataclass(frozen=True, eq=False)
class RoundPlan:
    """Sequences of all rounds, packed: sequence `i` holds `rows[cu_seqlens[i] : cu_seqlens[i + 1]]`.

    Sequences are ordered by round and then by their first owned row, so a source precedes those that start from it, in
    an earlier round. Every row of the tree is owned (not replayed) by exactly one sequence.

    Attributes:
        chunk_size (`int`): B, in tokens.
        rows (`np.ndarray` of shape `[T]`, int64): rows of all sequences; T = C + replayed tokens.
        cu_seqlens (`np.ndarray` of shape `[num_sequences + 1]`, int64): offsets of the sequences in `rows`.
        round (`np.ndarray` of shape `[num_sequences]`, int64): round of each sequence, not decreasing.
        replay (`np.ndarray` of shape `[num_sequences]`, int64): replayed rows at each sequence's head, less than B.
        source (`np.ndarray` of shape `[num_sequences]`, int64): sequence whose state at `start` is taken over; it
            starts before `start` and passes through it. -1 for the zero state.
        start (`np.ndarray` of shape `[num_sequences]`, int64): position of each sequence's first token.
    """

    chunk_size: int
    rows: np.ndarray
    cu_seqlens: np.ndarray
    round: np.ndarray
    replay: np.ndarray
    source: np.ndarray
    start: np.ndarray

    @property
    def num_sequences(self) -> int:
        """Sequences of all rounds: one per leaf of the tree."""
        return len(self.start)

    @property
    def num_rounds(self) -> int:
        """Rounds, at least 1."""
        return int(self.round[-1]) + 1

    @property
    def replay_tokens(self) -> int:
        """Replayed rows of all sequences: the sum over forks of (children - 1) * (fork position mod B)."""
        return int(self.replay.sum())

    @property
    def is_replayed(self) -> np.ndarray:
        """`[T]`, bool: which entries of `rows` are replayed and give no output."""
        lengths = np.diff(self.cu_seqlens)
        offsets = np.arange(len(self.rows)) - np.repeat(self.cu_seqlens[:-1], lengths)
        return offsets < np.repeat(self.replay, lengths)

    @cached_property
    def output_positions(self) -> np.ndarray:
        """`[C]`, int64: where in `rows` each row of the tree is owned."""
        owned = np.flatnonzero(~self.is_replayed)
        positions = np.empty(len(owned), dtype=np.int64)
        positions[self.rows[owned]] = owned
        return positions

    @cached_property
    def chunk_offsets(self) -> np.ndarray:
        """`[num_sequences + 1]`, int64: offsets of the sequences among the chunks of all sequences, one by one."""
        offsets = np.zeros(self.num_sequences + 1, dtype=np.int64)
        np.cumsum(-(-np.diff(self.cu_seqlens) // self.chunk_size), out=offsets[1:])
        return offsets

    @property
    def source_chunks(self) -> np.ndarray:
        """`[num_sequences]`, int64: chunk with whose end state each sequence starts; -1 for the zero state."""
        chunks_before = (self.start - self.start[self.source]) // self.chunk_size  # unused where the source is -1
        return np.where(self.source < 0, -1, self.chunk_offsets[self.source] + chunks_before - 1)

    @cached_property
    def sequences(self) -> tuple[RoundSequence, ...]:
        """The sequences one by one; their `rows` are views."""
        bounds = self.cu_seqlens.tolist()
        columns = (self.round.tolist(), self.replay.tolist(), self.source.tolist(), self.start.tolist())
        return tuple(
            RoundSequence(round=round_, rows=self.rows[begin:end], replay=replay, source=source, start=start)
            for begin, end, round_, replay, source, start in zip(bounds[:-1], bounds[1:], *columns, strict=True)
        )


def plan_rounds(tree: RowForest, chunk_size: int = 64) -> RoundPlan:
    """Cut a tree into sequences that start at chunk boundaries, in as few rounds as possible.

    A fork is a row with two or more children; the roots are the children of a virtual fork at position 0. A fork's
    position p is the number of tokens before its children, b = floor(p / B) * B. One child continues the fork's
    sequence. Every other child starts at b, after replaying the p - b rows before it: in the same round if the fork's
    sequence itself started at b, since that state is known, else one round later.

    Args:
        tree: the prefix tree, or any forest whose roots are at position 0.
        chunk_size: B, in tokens, at least 1.

    Returns:
        `RoundPlan` with the minimum number of rounds over all choices of the continuing children.

    Raises:
        ValueError: `chunk_size` below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")

    # Chains between forks, in depth-first order. A trajectory that ends inside a chain is no fork.
    num_children = np.bincount(tree.parent[tree.parent >= 0], minlength=tree.num_rows)
    chain_start = np.flatnonzero((tree.parent < 0) | (num_children[tree.parent] > 1))
    chain_end = np.append(chain_start[1:], tree.num_rows)
    chain_parent = np.searchsorted(chain_start, tree.parent[chain_start], side="right") - 1  # -1: the virtual fork
    fork_boundary = (tree.position_ids[chain_end - 1] + 1) // chunk_size * chunk_size

    parents, boundaries = chain_parent.tolist(), fork_boundary.tolist()
    direct_child = _choose_direct_children(parents, boundaries)
    sequence, head, round_, source = _assign_sequences(parents, boundaries, direct_child)

    # From depth-first order of the first owned row to the order of the plan.
    order = np.argsort(round_, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    source = np.where(source[order] < 0, -1, rank[source[order]])
    first_owned = chain_start[head[order]]
    replay = tree.position_ids[first_owned] % chunk_size

    chain_rank = rank[sequence]
    chain_lengths = chain_end - chain_start
    lengths = replay.copy()
    np.add.at(lengths, chain_rank, chain_lengths)
    cu_seqlens = np.zeros(len(order) + 1, dtype=np.int64)
    np.cumsum(lengths, out=cu_seqlens[1:])

    plan = RoundPlan(
        chunk_size=chunk_size,
        rows=np.empty(cu_seqlens[-1], dtype=np.int64),
        cu_seqlens=cu_seqlens,
        round=round_[order],
        replay=replay,
        source=source,
        start=tree.position_ids[first_owned] - replay,
    )
    by_sequence = np.argsort(chain_rank, kind="stable")
    moved = np.cumsum(chain_lengths[by_sequence]) - chain_lengths[by_sequence]
    plan.rows[~plan.is_replayed] = np.arange(tree.num_rows) + np.repeat(
        chain_start[by_sequence] - moved, chain_lengths[by_sequence]
    )
    _fill_replayed_rows(plan.rows, cu_seqlens[:-1] + replay, first_owned, replay, tree.parent)
    return plan


def _choose_direct_children(parents: list[int], boundaries: list[int]) -> list[int]:
    """For each chain, the child chain that continues its sequence; -1 at leaves.

    Two numbers per chain v, both counting the rounds of v and its descendants from the round of v's sequence on:
    cold(v) when that sequence started before b_v, and warm(v) when it started at b of v's parent fork. Both are 1 at
    leaves; otherwise, over the children of v,

        cold(v) = min over the direct child d of max(cold(d), 1 + max of warm over the others)
        warm(v) = max of warm over the children if b_v equals b of the parent fork, else cold(v)

    By induction warm(v) <= cold(v) <= 1 + warm(v). So a child a with the largest warm attains the minimum (any other
    direct child leaves a to the next round), which is cold(a) if a alone has it, and 1 + warm(a) if another has it
    too. Of several, the first child continues.
    """
    num_chains = len(parents)
    direct_child = [-1] * num_chains
    largest_warm = [0] * num_chains
    is_tied = [False] * num_chains
    cold = [1] * num_chains
    for v in range(num_chains - 1, -1, -1):  # children come after their parent
        warm_v = 1
        parent = parents[v]
        if direct_child[v] >= 0:
            cold[v] = 1 + largest_warm[v] if is_tied[v] else cold[direct_child[v]]
            started_at_boundary = boundaries[v] == (boundaries[parent] if parent >= 0 else 0)
            warm_v = largest_warm[v] if started_at_boundary else cold[v]
        if parent >= 0 and warm_v >= largest_warm[parent]:
            is_tied[parent] = warm_v == largest_warm[parent]
            largest_warm[parent] = warm_v
            direct_child[parent] = v
    return direct_child


def _assign_sequences(
    parents: list[int], boundaries: list[int], direct_child: list[int]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Sequence of each chain; first chain, round and source of each sequence, ordered by its first owned row."""
    sequence: list[int] = []
    head: list[int] = []
    rounds: list[int] = []
    sources: list[int] = []
    starts: list[int] = []
    for chain, parent in enumerate(parents):
        if parent >= 0 and direct_child[parent] == chain:
            sequence.append(sequence[parent])
            continue
        sequence.append(len(head))
        head.append(chain)
        if parent < 0:
            rounds.append(0)
            sources.append(-1)
            starts.append(0)
            continue
        before = sequence[parent]
        start = boundaries[parent]
        known = starts[before] == start
        rounds.append(rounds[before] + (not known))
        sources.append(sources[before] if known else before)
        starts.append(start)
    return tuple(np.array(column, dtype=np.int64) for column in (sequence, head, rounds, sources))


def _fill_replayed_rows(
    rows: np.ndarray, first_slot: np.ndarray, first_owned: np.ndarray, replay: np.ndarray, parent: np.ndarray
) -> None:
    """Write the replayed ancestors of each sequence in front of its first owned row, in place.

    All sequences step to their parent rows together, so there are less than B steps whatever the segments on the way.
    """
    ancestor = first_owned
    for step in range(1, int(replay.max()) + 1):
        active = replay >= step
        ancestor, first_slot, replay = parent[ancestor[active]], first_slot[active], replay[active]
        rows[first_slot - step] = ancestor
