"""PrefixTree: token sequences -> the rows of their prefix tree.

A row is one distinct prefix of the batch. Trajectories are sorted as big-endian byte strings, so that `memcmp` order
is token order; everything else (rows in depth-first order, parents, subtrees, counts) follows from the adjacent
longest common prefixes (LCPs) in one pass over the trajectories. No loop runs over tokens: 130M tokens take seconds,
and memory beyond the sorted copy of the tokens is linear in rows. Importing this file needs numpy alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class RowForest:
    """Rows of prefix trees in depth-first order, whatever trajectories they come from.

    Row `r` and its descendants are the rows `r .. subtree_end[r] - 1`, so row `k` is an ancestor of row `q`, or `q`
    itself, iff `k <= q < subtree_end[k]`.

    Attributes:
        token_ids (`np.ndarray` of shape `[C]`, int64): token of each row.
        position_ids (`np.ndarray` of shape `[C]`, int64): distance from the trajectory's first token, 0 at roots.
        parent (`np.ndarray` of shape `[C]`, int64): row of the prefix that is one token shorter; -1 at roots.
        subtree_end (`np.ndarray` of shape `[C]`, int64): one past the last row of the row's subtree.
        counts (`np.ndarray` of shape `[C]`, int64): how many trajectories pass through the row (HARTS: occurrences q).
    """

    token_ids: np.ndarray
    position_ids: np.ndarray
    parent: np.ndarray
    subtree_end: np.ndarray
    counts: np.ndarray

    @property
    def num_rows(self) -> int:
        """C: distinct prefixes, the tokens that are computed."""
        return len(self.token_ids)

    def segment_starts(self) -> np.ndarray:
        """First row of every segment.

        A segment is a maximal chain of rows without a fork and with one set of trajectories.

        Returns:
            `[num_segments]`, int64, increasing.
        """
        continues = np.zeros(self.num_rows, dtype=bool)
        continues[1:] = (self.parent[1:] == np.arange(self.num_rows - 1)) & (self.counts[1:] == self.counts[:-1])
        return np.flatnonzero(~continues)


@dataclass(frozen=True, eq=False)
class PrefixTree(RowForest):
    """The prefix tree (trie) of a set of trajectories, one row per distinct prefix, in depth-first order.

    A [`RowForest`] that knows its trajectories. Children of a row are in increasing order of their token. Build one
    with [`PrefixTree.from_sequences`].

    Attributes:
        lengths (`np.ndarray` of shape `[N]`, int64): length of each trajectory, in tokens, in the caller's order.
        sorted_order (`np.ndarray` of shape `[N]`, int64): trajectories in lexicographic order; ties keep the caller's
            order.
        sorted_lcp (`np.ndarray` of shape `[N]`, int64): common prefix, in tokens, of `sorted_order[k - 1]` and
            `sorted_order[k]`; 0 for the first.
    """

    lengths: np.ndarray
    sorted_order: np.ndarray
    sorted_lcp: np.ndarray
    _rank: np.ndarray  # [N] index of each trajectory in sorted_order
    _first_row: np.ndarray  # [N] by rank: first of the rows that this trajectory adds
    _owner: np.ndarray  # [N] by rank: the rank whose rows hold the prefix of length sorted_lcp; -1 if that is 0

    @classmethod
    def from_sequences(cls, sequences: Sequence) -> "PrefixTree":
        """Build the tree of `sequences`.

        Duplicates and sequences that are a prefix of another are ordinary trajectories. Cost: one sort of byte strings
        and one comparison of neighbours; linear in tokens apart from the sort.

        Args:
            sequences: list of 1-D integer arrays or lists, in any order; ids in `0 .. 2**31 - 1`.

        Raises:
            ValueError: no trajectory, an empty one, an array that is not 1-D, or an id out of range. The message names
                the trajectory.
            TypeError: ids that are not integers (floats are never rounded).
        """
        keys = [_sort_key(sequence, i) for i, sequence in enumerate(sequences)]
        if not keys:
            raise ValueError("a prefix tree needs at least one trajectory, got none")
        order = sorted(range(len(keys)), key=keys.__getitem__)
        tokens = [np.frombuffer(keys[i], dtype=">u4") for i in order]
        lcp = np.zeros(len(order), dtype=np.int64)
        for k in range(1, len(order)):
            lcp[k] = _common_prefix(tokens[k - 1], tokens[k])
        return cls._from_sorted(tokens, np.array(order, dtype=np.int64), lcp)

    @classmethod
    def without_sharing(cls, sequences: Sequence) -> "PrefixTree":
        """The forest in which every trajectory has rows of its own, in the caller's order: a packed batch.

        What sharing is compared with. Arguments and errors are those of [`PrefixTree.from_sequences`].
        """
        tokens = [np.frombuffer(_sort_key(sequence, i), dtype=">u4") for i, sequence in enumerate(sequences)]
        if not tokens:
            raise ValueError("a prefix tree needs at least one trajectory, got none")
        return cls._from_sorted(tokens, np.arange(len(tokens)), np.zeros(len(tokens), dtype=np.int64))

    @classmethod
    def _from_sorted(cls, tokens: list[np.ndarray], order: np.ndarray, lcp: np.ndarray) -> "PrefixTree":
        num_trajectories = len(tokens)
        sorted_lengths = np.array([len(t) for t in tokens], dtype=np.int64)
        first_row = np.zeros(num_trajectories + 1, dtype=np.int64)
        np.cumsum(sorted_lengths - lcp, out=first_row[1:])
        num_rows = int(first_row[-1])

        token_ids = np.concatenate([t[n:] for t, n in zip(tokens, lcp, strict=True)]).astype(np.int64)
        parent = np.arange(-1, num_rows - 1, dtype=np.int64)
        position_ids = np.arange(num_rows, dtype=np.int64)
        position_ids -= np.repeat(first_row[:-1] - lcp, sorted_lengths - lcp)
        subtree_end = np.empty(num_rows, dtype=np.int64)
        counts = np.empty(num_rows, dtype=np.int64)
        owner = np.full(num_trajectories, -1, dtype=np.int64)

        # A stack of [rank, depth one past its open rows]: the path of the trajectory before k. Trajectory k closes all
        # open rows at depths >= lcp[k]; a row opened by rank j and closed by k is shared by the ranks j .. k - 1.
        stack: list[list[int]] = []

        def close(depth: int, k: int) -> None:
            while stack:
                j, open_end = stack[-1]
                start = max(depth, int(lcp[j]))
                rows = slice(first_row[j] + start - lcp[j], first_row[j] + open_end - lcp[j])
                subtree_end[rows] = first_row[k]
                counts[rows] = k - j
                if start > lcp[j]:
                    stack[-1][1] = start
                    return
                stack.pop()

        for k in range(num_trajectories):
            depth = int(lcp[k])
            close(depth, k)
            if stack:  # the top holds the row at depth - 1
                j = stack[-1][0]
                owner[k] = j
                if sorted_lengths[k] > depth:
                    parent[first_row[k]] = first_row[j] + depth - 1 - lcp[j]
            elif sorted_lengths[k] > depth:
                parent[first_row[k]] = -1
            if sorted_lengths[k] > depth:
                stack.append([k, int(sorted_lengths[k])])
        close(0, num_trajectories)

        rank = np.empty(num_trajectories, dtype=np.int64)
        rank[order] = np.arange(num_trajectories)
        return cls(
            token_ids=token_ids,
            position_ids=position_ids,
            parent=parent,
            subtree_end=subtree_end,
            counts=counts,
            lengths=sorted_lengths[rank],
            sorted_order=order,
            sorted_lcp=lcp,
            _rank=rank,
            _first_row=first_row,
            _owner=owner,
        )

    @property
    def num_tokens(self) -> int:
        """S: expanded tokens, the sum of the trajectories' lengths."""
        return int(self.lengths.sum())

    @property
    def num_trajectories(self) -> int:
        """N: trajectories, duplicates counted."""
        return len(self.lengths)

    @property
    def compression(self) -> float:
        """S / C, at least 1."""
        return self.num_tokens / self.num_rows

    def rows(self, trajectory: int) -> np.ndarray:
        """Rows of one trajectory, root first.

        Args:
            trajectory: index in the caller's order.

        Returns:
            `[lengths[trajectory]]`, int64: increasing rows, `token_ids[rows]` is the trajectory.

        Raises:
            IndexError: no such trajectory; negative indices are not taken from the end.
        """
        if not 0 <= trajectory < self.num_trajectories:
            raise IndexError(f"trajectory {trajectory} is out of range for {self.num_trajectories} trajectories")
        pieces = []
        k = int(self._rank[trajectory])
        depth_end = int(self.lengths[trajectory])
        while k >= 0:
            depth = int(self.sorted_lcp[k])
            first = int(self._first_row[k])
            pieces.append(np.arange(first, first + depth_end - depth))
            depth_end = depth
            k = int(self._owner[k])
        return np.concatenate(pieces[::-1])

    def all_rows(self) -> list[np.ndarray]:
        """Rows of every trajectory, in the caller's order: entry `i` equals `rows(i)`.

        Cost: linear in expanded tokens, whatever the depth of the tree.
        """
        rows: list[np.ndarray] = [np.empty(0, dtype=np.int64)] * self.num_trajectories
        path = np.empty(0, dtype=np.int64)
        for k, trajectory in enumerate(self.sorted_order):
            added = np.arange(self._first_row[k], self._first_row[k + 1])
            path = np.concatenate([path[: self.sorted_lcp[k]], added])
            rows[trajectory] = path
        return rows


def _sort_key(sequence, index: int) -> bytes:
    """Tokens of one trajectory as big-endian 32-bit bytes."""
    try:
        array = np.asarray(sequence)
    except ValueError as error:  # numpy's message on nested lists of unequal length names no trajectory
        raise ValueError(f"trajectory {index}: token ids must be one-dimensional") from error
    if array.ndim != 1:
        raise ValueError(f"trajectory {index}: token ids must be one-dimensional, got shape {array.shape}")
    if array.size == 0:
        raise ValueError(f"trajectory {index} is empty: every trajectory needs at least one token id")
    if array.dtype.kind not in "iu":
        raise TypeError(f"trajectory {index}: token ids must be integers, got dtype {array.dtype}")
    if array.min() < 0 or array.max() >= 2**31:
        raise ValueError(
            f"trajectory {index}: token ids must lie in 0 .. 2**31 - 1, got {array.min()} .. {array.max()}"
        )
    return array.astype(">u4").tobytes()


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that `a` and `b` share."""
    n = min(len(a), len(b))
    block = 4096  # most neighbours part early or share long prefixes: look at a block before the whole
    for start in range(0, n, block):
        differs = a[start : min(start + block, n)] != b[start : min(start + block, n)]
        first = int(differs.argmax())
        if differs[first]:
            return start + first
    return n
