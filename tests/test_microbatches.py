"""plan_step covers every trajectory once, within the budget, and counts compact work as the definition says."""

import warnings

import numpy as np
import pytest

from harts_hf.planning.microbatches import plan_step
from harts_hf.tree import PrefixTree


def count_rows(sequences):
    """Distinct prefixes, by definition."""
    return len({tuple(s[: k + 1]) for s in sequences for k in range(len(s))})


def random_sequences(rng):
    return [rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(rng.integers(1, 14))]


def check_plan(plan, sequences, max_tokens, num_replicas):
    assert sorted(i for m in plan.microbatches for i in m.trajectories) == list(range(len(sequences)))
    assert all(len(slot) == num_replicas and any(m is not None for m in slot) for slot in plan.slots)
    for m in plan.microbatches:
        members = [sequences[i] for i in m.trajectories]
        assert m.rows == count_rows(members)
        assert members == sorted(members)
        assert m.rows <= max_tokens or len(m.trajectories) == 1
    assert plan.num_tokens == sum(map(len, sequences))


@pytest.mark.filterwarnings("ignore:trajectory")
@pytest.mark.parametrize("seed", range(200))
def test_random_plans_are_sound(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng)
    max_tokens = int(rng.integers(1, 40))
    num_replicas = int(rng.integers(1, 5))
    plan = plan_step(sequences, max_tokens, num_replicas)
    check_plan(plan, sequences, max_tokens, num_replicas)
    assert plan == plan_step(PrefixTree.from_sequences(sequences), max_tokens, num_replicas)


def test_a_trajectory_above_the_budget_runs_alone_and_is_named():
    sequences = [[1, 2], [1] * 9, [1, 3]]
    with pytest.warns(UserWarning, match="trajectory 1 has 9 tokens"):
        plan = plan_step(sequences, max_tokens=4)
    assert (1,) in [m.trajectories for m in plan.microbatches]


def test_a_trajectory_at_the_budget_is_no_exception():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_step([[1] * 4, [2]], max_tokens=4)
    assert plan.compact_tokens == 5


@pytest.mark.parametrize("arguments", [{"max_tokens": 0}, {"num_replicas": 0}])
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        plan_step([[1]], **arguments)
