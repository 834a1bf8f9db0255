"""Independent evaluator of step plans: it knows the definition of compact work and nothing of the planner.

The rows of a set of trajectories are its distinct prefixes. A consumer's rows exclude the prefixes of the shared
prefix it starts from; a producer's rows are the shared prefix, counted once per window, in the slot of the first
consumer.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Evaluation:
    """What a plan costs.

    Attributes:
        rows: `[slots, replicas]`: rows that each replica runs in each slot.
        num_tokens: expanded tokens.
        largest: most rows of a replica in a slot; trajectories above the budget excluded.
    """

    rows: np.ndarray
    num_tokens: int
    largest: int

    @property
    def compression(self) -> float:
        return self.num_tokens / int(self.rows.sum())

    @property
    def balances(self) -> np.ndarray:
        return self.rows.mean(axis=1) / self.rows.max(axis=1)

    @property
    def slot_critical(self) -> int:
        return int(self.rows.max(axis=1).sum())


def count_rows(sequences) -> int:
    """Distinct prefixes of a set of int32 arrays: sorted neighbours add what they do not share."""
    keys = sorted(sequence.astype(">u4").tobytes() for sequence in sequences)
    rows = 0
    previous = b""
    for key in keys:
        shared = min(len(previous), len(key)) // 4
        a = np.frombuffer(previous, dtype=np.uint32, count=shared)
        b = np.frombuffer(key, dtype=np.uint32, count=shared)
        differs = np.flatnonzero(a != b)
        rows += len(key) // 4 - (int(differs[0]) if len(differs) else shared)
        previous = key
    return rows


def evaluate(sequences, slots, windows, max_tokens: int) -> Evaluation:
    """Count rows and check the plan.

    Args:
        sequences: all trajectories, int32 arrays.
        slots: `[slot][replica]` -> `(trajectories, window index or None)` or `None`.
        windows: `(trajectory, prefix_tokens, replica, consumer slots, index of the window around it or None)` of each
            window.
        max_tokens: the budget of a replica in a slot.

    Raises:
        AssertionError: a trajectory that is not in exactly one microbatch, a microbatch above the budget (unless it is
            one trajectory and its prefixes), or a window whose consumers are not consecutive, not on its replica, or
            do not start with its prefix.
    """
    seen = np.zeros(len(sequences), dtype=int)
    rows = np.zeros((len(slots), len(slots[0])), dtype=np.int64)
    for s, slot in enumerate(slots):
        assert len(slot) == rows.shape[1]
        for r, microbatch in enumerate(slot):
            if microbatch is None:
                continue
            trajectories, window = microbatch
            seen[list(trajectories)] += 1
            rows[s, r] = count_rows([sequences[i] for i in trajectories])
            if window is not None:
                owner, tokens, replica, consumers, _ = windows[window]
                prefix = sequences[owner][:tokens]
                assert replica == r and s in consumers
                starts = [np.array_equal(sequences[i][:tokens], prefix[: len(sequences[i])]) for i in trajectories]
                inside = [sequences[i] for i, within in zip(trajectories, starts, strict=True) if within]
                outside = [sequences[i] for i, within in zip(trajectories, starts, strict=True) if not within]
                assert max(map(len, inside)) >= tokens
                rows[s, r] = count_rows(inside) - tokens + count_rows(outside)
    assert (seen == 1).all(), "every trajectory is in exactly one microbatch"
    for owner, tokens, replica, consumers, parent in windows:
        assert list(consumers) == list(range(consumers[0], consumers[0] + len(consumers)))
        assert len(consumers) > 1 or len(sequences[owner]) > max_tokens
        assert len(sequences[owner]) >= tokens
        given = 0
        if parent is not None:
            around, given, of_replica, slots_around, _ = windows[parent]
            assert of_replica == replica and set(consumers) <= set(slots_around)
            assert given < tokens and np.array_equal(sequences[owner][:given], sequences[around][:given])
        rows[consumers[0], replica] += tokens - given
    largest = 0
    for s, slot in enumerate(slots):
        for r, microbatch in enumerate(slot):
            if microbatch is not None and max(len(sequences[i]) for i in microbatch[0]) <= max_tokens:
                assert rows[s, r] <= max_tokens, (s, r, rows[s, r])
                largest = max(largest, int(rows[s, r]))
    return Evaluation(rows, sum(map(len, sequences)), largest)


def of_step_plan(plan):
    """`slots` and `windows` of a `harts_hf` StepPlan in the evaluator's form."""
    slots = [[None if m is None else (m.trajectories, m.window) for m in slot] for slot in plan.slots]
    return slots, [(w.trajectory, w.prefix_tokens, w.replica, w.consumers, w.parent) for w in plan.windows]
