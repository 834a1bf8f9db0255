"""ConsumerTree: the rows of a microbatch that starts from the boundary of a sharing window.

Known rows are numbered through: first the prefix, root first, which a producer has computed, then the microbatch's own
rows. Trajectories that start with the prefix continue it, those that end inside of it add no row, all others start at
their own root. So the known rows are an ordinary forest in depth-first order, of which the first rows are given.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from harts_hf.tree import PrefixTree, RowForest


@dataclass(frozen=True, eq=False)
class ConsumerTree(RowForest):
    """The known rows of a microbatch: `prefix_rows` given ones, then its own.

    Attributes:
        prefix_rows (`int`): rows of the prefix.
        continued_rows (`int`): own rows that continue the prefix; they stand before those that start at a root.
        trajectory_rows (`tuple[np.ndarray, ...]`): known rows of each trajectory, root first.
    """

    prefix_rows: int
    continued_rows: int
    trajectory_rows: tuple[np.ndarray, ...]

    def all_rows(self) -> list[np.ndarray]:
        """Known rows of every trajectory, in the caller's order."""
        return list(self.trajectory_rows)

    def replay_forest(self, chunk_size: int) -> RowForest:
        """The own rows behind the last `prefix_rows % chunk_size` rows of the prefix.

        Positions below the prefix count from the prefix's last chunk boundary, so that chunks lie where they lie in
        the whole trajectory. Without such rows, what continues the prefix starts at roots, which stand first.
        """
        replayed = self.prefix_rows % chunk_size
        first = self.prefix_rows - replayed
        position_ids = self.position_ids[first:].copy()
        position_ids[: replayed + self.continued_rows] -= first
        return RowForest(
            token_ids=self.token_ids[first:],
            position_ids=position_ids,
            parent=np.maximum(self.parent[first:] - first, -1),
            subtree_end=self.subtree_end[first:] - first,
            counts=self.counts[first:],
        )


def consumer_tree(sequences: Sequence[np.ndarray], prefix: np.ndarray) -> ConsumerTree:
    """The known rows of a consumer.

    Args:
        sequences: tokens of the microbatch's trajectories.
        prefix: tokens of the shared prefix.

    Raises:
        ValueError: no trajectory goes on where the prefix ends.
    """
    tokens = len(prefix)
    places = [place_on_prefix(sequence, prefix) for sequence in sequences]
    continued = [i for i, place in enumerate(places) if place == tokens and len(sequences[i]) > tokens]
    apart = [i for i, place in enumerate(places) if place < 0]
    if not continued:
        raise ValueError("a consumer needs a trajectory that goes on where the shared prefix ends")
    parts = [PrefixTree.from_sequences([sequences[i][tokens:] for i in continued])]
    if apart:
        parts.append(PrefixTree.from_sequences([sequences[i] for i in apart]))
    below = parts[0].num_rows

    on_prefix = np.arange(tokens)
    rows = [on_prefix[:place] for place in places]
    for i, own in zip(continued, parts[0].all_rows(), strict=True):
        rows[i] = np.concatenate([on_prefix, tokens + own])
    if apart:
        for i, own in zip(apart, parts[1].all_rows(), strict=True):
            rows[i] = tokens + below + own

    # Roots that continue the prefix hang below its last row; the others stay roots.
    begins = [tokens, tokens + below]
    parents = [np.where(parts[0].parent < 0, tokens - 1, parts[0].parent + tokens)]
    parents += [np.where(part.parent < 0, -1, part.parent + begins[1]) for part in parts[1:]]
    prefix_counts = np.zeros(tokens, dtype=np.int64)
    for place in places:
        prefix_counts[: max(place, 0)] += 1
    return ConsumerTree(
        token_ids=np.concatenate([prefix, *(part.token_ids for part in parts)]),
        position_ids=np.concatenate(
            [on_prefix, parts[0].position_ids + tokens, *(part.position_ids for part in parts[1:])]
        ),
        parent=np.concatenate([on_prefix - 1, *parents]),
        subtree_end=np.concatenate(
            [
                np.full(tokens, tokens + below),
                *(part.subtree_end + begin for part, begin in zip(parts, begins, strict=False)),
            ]
        ),
        counts=np.concatenate([prefix_counts, *(part.counts for part in parts)]),
        prefix_rows=tokens,
        continued_rows=below,
        trajectory_rows=tuple(rows),
    )


def producer_tree(prefix: np.ndarray, start: int, counts: np.ndarray) -> ConsumerTree:
    """The known rows of a producer: a path, of which the first `start` rows are given.

    Args:
        prefix: tokens of the producer's prefix.
        start: tokens of the prefix of the window around it; 0 for none.
        counts: `[len(prefix)]`, trajectories of all consumers that pass through each row.
    """
    rows = np.arange(len(prefix))
    return ConsumerTree(
        token_ids=prefix,
        position_ids=rows,
        parent=rows - 1,
        subtree_end=np.full(len(prefix), len(prefix)),
        counts=counts,
        prefix_rows=start,
        continued_rows=len(prefix) - start,
        trajectory_rows=(rows,),
    )


def filler_tree() -> ConsumerTree:
    """Two rows that stand for no trajectory: what a rank runs that has nothing to run while others do."""
    return ConsumerTree(
        token_ids=np.zeros(2, dtype=np.int64),
        position_ids=np.arange(2),
        parent=np.array([-1, 0]),
        subtree_end=np.full(2, 2),
        counts=np.zeros(2, dtype=np.int64),
        prefix_rows=0,
        continued_rows=0,
        trajectory_rows=(),
    )


def place_on_prefix(sequence: np.ndarray, prefix: np.ndarray) -> int:
    """Tokens of a prefix that a trajectory takes from its producer: all, or those up to the trajectory's own end.

    -1 if the trajectory parts from the prefix before: it starts at its own root.
    """
    common = min(len(sequence), len(prefix))
    return common if np.array_equal(sequence[:common], prefix[:common]) else -1
