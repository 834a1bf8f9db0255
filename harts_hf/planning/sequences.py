"""plan_sequences: a round plan -> what each program of the tree kernels runs, and in which order.

All sequences of a tree run in one launch. A program walks one sequence; where another sequence starts from its state
it leaves that state in a slot, and the other waits for it. Sequences are cut into pieces at those boundaries.
Backward, the sequences that start from a slot add their gradients in groups, one after another within a group, so that
neither memory nor time grows badly with thousands of branches at one fork.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .boundaries import locate_boundaries
from .rounds import RoundPlan

MAX_GROUP = 64  # sequences that add to one accumulator; a fork of n branches takes n / 64 of them


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """Units that a program each runs: sequences, or single pieces of them. Arrays are int64.

    Attributes:
        forward_order (`np.ndarray` of shape `[U]`): units in the order in which the forward kernel starts them.
        tokens (`np.ndarray` of shape `[U, 2]`): first packed token, and one past the last.
        first_chunk (`np.ndarray` of shape `[U]`): chunk of the first token.
        source (`np.ndarray` of shape `[U]`): slot whose state the unit starts from.
        piece_offsets (`np.ndarray` of shape `[U + 1]`): pieces of each unit.
        piece_chunks (`np.ndarray` of shape `[P]`): chunks of each piece, at least 1.
        piece_slots (`np.ndarray` of shape `[P]`): slot that takes the state at the piece's end; -1 for none.
    """

    forward_order: np.ndarray
    tokens: np.ndarray
    first_chunk: np.ndarray
    source: np.ndarray
    piece_offsets: np.ndarray
    piece_chunks: np.ndarray
    piece_slots: np.ndarray


@dataclass(frozen=True, eq=False)
class SequencePlan:
    """Sequences of a tree with their slots and groups. Arrays are int64; packed tokens are those of the round plan.

    Slots are the roots, in row order, and then the boundaries. Groups are ordered by slot.

    Attributes:
        num_roots (`int`): slots that stand for the states above the roots.
        num_slots (`int`): roots and boundaries.
        chunk_indices (`np.ndarray` of shape `[num_chunks, 2]`): sequence, and number in the sequence, of each chunk.
        owned_rows (`np.ndarray` of shape `[T]`): row of each packed token; -1 where it is replayed.
        sequences (`UnitPlan`): one unit per sequence.
        pieces (`UnitPlan`): one unit per piece.
        group_offsets (`np.ndarray` of shape `[num_slots + 1]`): groups of each slot.
        group_sizes (`np.ndarray` of shape `[num_groups]`): sequences of each group.
        group, rank_in_group (`np.ndarray` of shape `[N]`): group of each sequence, and its turn there.
        backward_order (`np.ndarray` of shape `[N]`): sequences in an order in which one that starts from another, or
            that comes before another in a group, precedes it.
        longest (`int`): the sequence with most tokens; the last of its group.
        requested_slots (`np.ndarray` of shape `[M]`): slots of the requested states.
    """

    num_roots: int
    num_slots: int
    chunk_indices: np.ndarray
    owned_rows: np.ndarray
    sequences: UnitPlan
    pieces: UnitPlan
    group_offsets: np.ndarray
    group_sizes: np.ndarray
    group: np.ndarray
    rank_in_group: np.ndarray
    backward_order: np.ndarray
    longest: int
    requested_slots: np.ndarray


def plan_sequences(rounds: RoundPlan, boundary_rows: Sequence[int] = ()) -> SequencePlan:
    """Slots, pieces, groups and orders of all sequences. Linear in tokens, and sorting the sequences.

    Args:
        rounds: sequences of the tree.
        boundary_rows: different rows, each the last of a full chunk: the states after them are requested.

    Raises:
        ValueError: a boundary row is not the last of a full chunk, or is given twice.
    """
    size, num_sequences = rounds.chunk_size, rounds.num_sequences
    begins, lengths = rounds.cu_seqlens[:-1], np.diff(rounds.cu_seqlens)
    chunk_offsets = rounds.chunk_offsets
    num_chunks = int(chunk_offsets[-1])
    sequence_of_chunk = np.repeat(np.arange(num_sequences), np.diff(chunk_offsets))
    chunk_indices = np.stack([sequence_of_chunk, np.arange(num_chunks) - chunk_offsets[sequence_of_chunk]], axis=1)

    # Boundaries are known by the chunk that ends there; in a sequence, chunks are numbered in order.
    is_root = rounds.source < 0
    boundary_sequence, boundary_tokens = locate_boundaries(rounds, boundary_rows)
    requested = chunk_offsets[boundary_sequence] + boundary_tokens // size - 1
    source_chunks = rounds.source_chunks[~is_root]
    boundaries = np.unique(np.concatenate([source_chunks, requested]))
    roots, root_of = np.unique(rounds.rows[begins[is_root]], return_inverse=True)
    source = np.empty(num_sequences, dtype=np.int64)
    source[is_root] = root_of
    source[~is_root] = len(roots) + np.searchsorted(boundaries, source_chunks)
    num_slots = len(roots) + len(boundaries)

    sequences, pieces = _units(rounds, boundaries, len(roots), source)

    by_group = np.lexsort((np.arange(num_sequences), lengths, source))  # by slot, short sequences first
    in_slot = np.arange(num_sequences) - np.searchsorted(source[by_group], source[by_group])
    dependents = np.bincount(source, minlength=num_slots)
    group_offsets = _offsets(-(-dependents // MAX_GROUP))
    group = np.empty(num_sequences, dtype=np.int64)
    rank = np.empty_like(group)
    group[by_group] = group_offsets[source[by_group]] + in_slot // MAX_GROUP
    rank[by_group] = in_slot % MAX_GROUP
    turn = np.empty_like(group)
    turn[by_group] = np.arange(num_sequences)

    return SequencePlan(
        num_roots=len(roots),
        num_slots=num_slots,
        chunk_indices=chunk_indices,
        owned_rows=np.where(rounds.is_replayed, -1, rounds.rows),
        sequences=sequences,
        pieces=pieces,
        group_offsets=group_offsets,
        group_sizes=np.bincount(group, minlength=int(group_offsets[-1])),
        group=group,
        rank_in_group=rank,
        backward_order=np.lexsort((turn, -rounds.start)),
        longest=int(by_group[::-1][np.argmax(lengths[by_group[::-1]])]),
        requested_slots=len(roots) + np.searchsorted(boundaries, requested),
    )


def _units(rounds: RoundPlan, boundaries: np.ndarray, num_roots: int, source: np.ndarray) -> tuple[UnitPlan, UnitPlan]:
    """Units of whole sequences, and of their pieces."""
    size, chunk_offsets = rounds.chunk_size, rounds.chunk_offsets
    begins, ends = rounds.cu_seqlens[:-1], rounds.cu_seqlens[1:]
    piece_ends = np.union1d(boundaries, chunk_offsets[1:] - 1)  # last chunk of each piece
    piece_begins = np.concatenate([[0], piece_ends[:-1] + 1])
    sequence = np.searchsorted(chunk_offsets, piece_begins, side="right") - 1
    slot = np.searchsorted(boundaries, piece_ends)
    has_slot = np.zeros(len(piece_ends), dtype=bool)
    if len(boundaries):
        has_slot = boundaries[np.minimum(slot, len(boundaries) - 1)] == piece_ends
    piece_slots = np.where(has_slot, num_roots + slot, -1)

    is_head = piece_begins == chunk_offsets[sequence]
    first_token = begins[sequence] + (piece_begins - chunk_offsets[sequence]) * size
    last_token = np.minimum(ends[sequence], first_token + (piece_ends + 1 - piece_begins) * size)
    piece_source = np.where(is_head, source[sequence], np.concatenate([[-1], piece_slots[:-1]]))
    piece_chunks = piece_ends + 1 - piece_begins

    sequences = UnitPlan(
        forward_order=np.lexsort((begins - ends, rounds.start)),
        tokens=np.stack([begins, ends], axis=1),
        first_chunk=chunk_offsets[:-1],
        source=source,
        piece_offsets=np.searchsorted(piece_begins, chunk_offsets),
        piece_chunks=piece_chunks,
        piece_slots=piece_slots,
    )
    pieces = UnitPlan(
        forward_order=np.argsort(-piece_chunks, kind="stable"),
        tokens=np.stack([first_token, last_token], axis=1),
        first_chunk=piece_begins,
        source=piece_source,
        piece_offsets=np.arange(len(piece_ends) + 1),
        piece_chunks=piece_chunks,
        piece_slots=piece_slots,
    )
    return sequences, pieces


def _offsets(counts: np.ndarray) -> np.ndarray:
    offsets = np.zeros(len(counts) + 1, dtype=np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
