"""plan_step covers every trajectory once, within the budget, aligned, and counts rows as the definition says."""

import subprocess
import sys
import warnings

import numpy as np
import pytest

from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.plan import OBJECTIVES, Microbatch, StepPlan, Window
from harts_hf.planning.window_memory import WindowMemory
from harts_hf.tree import PrefixTree


def distinct_prefixes(sequences):
    """Rows of a set of trajectories, by definition."""
    return {tuple(s[: k + 1]) for s in sequences for k in range(len(s))}


def random_sequences(rng, most=24, alphabet=3, longest=14):
    return [rng.integers(0, alphabet, rng.integers(1, longest)).tolist() for _ in range(rng.integers(1, most))]


def check_plan(plan, sequences, max_tokens, num_replicas):
    """Everything that an executor relies on, counted from the sequences alone."""
    sequences = [[int(t) for t in s] for s in sequences]
    assert sorted(i for m in plan.microbatches for i in m.trajectories) == list(range(len(sequences)))
    assert plan.num_tokens == sum(map(len, sequences))
    assert all(len(slot) == num_replicas and any(m is not None for m in slot) for slot in plan.slots)
    total = 0
    for s, slot in enumerate(plan.slots):
        for replica, m in enumerate(slot):
            if m is None:
                assert plan.slot_rows[s][replica] == 0
                continue
            members = [sequences[i] for i in m.trajectories]
            assert members == sorted(members)
            rows = distinct_prefixes(members)
            charged = len(rows)
            producers = sum(
                produced
                for w, produced in zip(plan.windows, plan.producer_rows, strict=True)
                if w.replica == replica and w.consumers[0] == s
            )
            if m.window is not None:
                window = plan.windows[m.window]
                assert window.replica == replica and s in window.consumers
                prefix = sequences[window.trajectory][: window.prefix_tokens]
                assert len(prefix) == window.prefix_tokens > 0
                assert tuple(prefix) in rows, "a consumer starts from its window's boundary"
                inside = [member for member in members if prefix[: len(member)] == member[: len(prefix)]]
                outside = [member for member in members if member not in inside]
                own = distinct_prefixes(inside) - distinct_prefixes([prefix])
                assert m.rows == len(own) + len(distinct_prefixes(outside))
                charged = m.rows + producers
                assert m.rows <= max_tokens
            else:
                assert m.rows == charged
            assert plan.slot_rows[s][replica] == charged
            assert charged <= max(max_tokens, *map(len, members))
            if max(map(len, members)) > max_tokens and m.window is None:
                longest = max(members, key=len)
                assert all(member == longest[: len(member)] for member in members), "above the budget: alone"
            total += charged
    for k, window in enumerate(plan.windows):
        consumers = window.consumers
        assert list(consumers) == list(range(consumers[0], consumers[-1] + 1))
        assert all(k in plan.windows_above(plan.slots[s][window.replica].window) for s in consumers)
        assert 0 < plan.producer_rows[k] <= max_tokens
        length = len(sequences[window.trajectory])
        assert len(consumers) > 1 or length > max_tokens, "one consumer: a piece of what is above the budget"
        if window.parent is not None:
            outer = plan.windows[window.parent]
            assert window.parent < k and outer.replica == window.replica and set(consumers) <= set(outer.consumers)
            prefix = sequences[outer.trajectory][: outer.prefix_tokens]
            assert sequences[window.trajectory][: outer.prefix_tokens] == prefix
    assert plan.compact_tokens == total == sum(map(sum, plan.slot_rows))


def aligned(plan):
    return all(m is not None for slot in plan.slots for m in slot)


def measures(plan):
    return plan.compact_tokens, plan.slot_critical_rows, plan.replica_critical_rows


@pytest.mark.filterwarnings("ignore:trajectory")
@pytest.mark.parametrize("seed", range(600))
def test_random_plans_are_sound(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng)
    max_tokens = int(rng.integers(1, 50))
    num_replicas = int(rng.integers(1, 6))
    objective = OBJECTIVES[seed % 3]
    plain = plan_step(sequences, max_tokens, num_replicas, objective=objective)
    check_plan(plain, sequences, max_tokens, num_replicas)
    assert not plain.windows and plain.objective == objective
    tree = PrefixTree.from_sequences(sequences)
    assert plain == plan_step(tree, max_tokens, num_replicas, objective=objective)

    plan = plan_step(tree, max_tokens, num_replicas, True, objective=objective)
    check_plan(plan, sequences, max_tokens, num_replicas)
    order = sorted(range(3), key=lambda k: k != OBJECTIVES.index(objective))
    assert [measures(plan)[k] for k in order] <= [measures(plain)[k] for k in order], "windows never make it worse"

    # Aligned: a cell stays empty only where no microbatch can be divided into distinct trajectories, or where filling
    # it would add to the total work that comes first.
    if objective == "compact_work":
        return
    distinct = {tuple(s) for s in sequences}
    leaves = [s for s in distinct if not any(s != t and s == t[: len(s)] for t in distinct)]
    if len(leaves) >= len(plain.slots) * num_replicas:
        assert aligned(plain), f"seed {seed}"


def test_a_cell_that_costs_work_stays_empty_if_total_work_comes_first():
    prompt = list(range(20))
    sequences = [[*prompt, 100 + k] for k in range(30)]
    for windows in (False, True):
        plan = plan_step(sequences, 40, 4, windows, objective="compact_work")
        check_plan(plan, sequences, 40, 4)
        assert plan.compact_tokens == 2 * 20 + 30 and len(plan.microbatches) == 2
        assert aligned(plan_step(sequences, 40, 4, windows)), "the slot's length comes first by default"
    apart = [np.full(10, k) for k in range(8)]
    assert aligned(plan_step(apart, 40, 4, objective="compact_work")), "a cell that costs nothing is filled"


@pytest.mark.filterwarnings("ignore:trajectory")
@pytest.mark.parametrize("seed", range(100))
def test_cost_model_and_memory_bound_hold(seed):
    rng = np.random.default_rng(seed)
    sequences = random_sequences(rng, alphabet=2)
    memory = WindowMemory(max_bytes=100, row_bytes=20, boundary_bytes=31)
    cost = CostModel(row=1.5, pair=0.1, replay=0.75, chunk_size=4)
    max_tokens = int(rng.integers(10, 30))
    plan = plan_step(sequences, max_tokens, 2, True, cost=cost, window_memory=memory)
    check_plan(plan, sequences, max_tokens, 2)
    assert plan.cost == "1.5 rows + 0.1 visible pairs + 0.75 replayed rows"
    assert all(memory.window_bytes(w.prefix_tokens) <= 100 for w in plan.windows if len(w.consumers) > 1)
    assert memory.max_prefix_tokens == 3
    nothing = WindowMemory(max_bytes=30, row_bytes=20, boundary_bytes=31)
    divided = plan_step(sequences, max_tokens, 2, True, window_memory=nothing).windows
    assert all(len(sequences[w.trajectory]) > max_tokens for w in divided), "what is too long runs all the same"


def test_windows_share_what_microbatches_repeat():
    prompt = list(range(20))
    sequences = [[*prompt, 100 + k, *range(200 + 9 * k, 209 + 9 * k)] for k in range(12)]
    plain = plan_step(sequences, max_tokens=40)
    plan = plan_step(sequences, max_tokens=40, windows=True)
    check_plan(plan, sequences, 40, 1)
    assert plan.compact_tokens == PrefixTree.from_sequences(sequences).num_rows == 20 + 12 * 10
    assert plain.compact_tokens == 12 * 10 + 6 * 20
    assert [w.prefix_tokens for w in plan.windows] == [20]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_window_is_opened_where_it_saves_more_than_it_costs(objective):
    prompt = list(range(20))
    sequences = [[*prompt, *range(200 + 9 * k, 210 + 9 * k)] for k in range(12)]

    def num_windows(producer):
        cost = CostModel(producer=producer)
        plan = plan_step(sequences, max_tokens=40, windows=True, objective=objective, cost=cost)
        check_plan(plan, sequences, 40, 1)
        return len(plan.windows)

    least = PrefixTree.from_sequences(sequences).num_rows
    saved = plan_step(sequences, max_tokens=40, objective=objective).compact_tokens - least
    assert num_windows(saved - 1) == 1 and num_windows(saved + 1) == 0


def test_a_trajectory_above_the_budget_runs_alone_and_is_named():
    sequences = [[1, 2], [1] * 9, [1, 3], [1] * 7]
    with pytest.warns(UserWarning, match="trajectory 1 has 9 tokens, more than max_tokens=4; it runs alone") as caught:
        plan = plan_step(sequences, max_tokens=4)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert (3, 1) in [m.trajectories for m in plan.microbatches], "its own prefixes add no row"
    check_plan(plan, sequences, 4, 1)


def test_a_trajectory_at_the_budget_is_no_exception():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = plan_step([[1] * 4, [2]], max_tokens=4)
    assert plan.compact_tokens == 5


@pytest.mark.parametrize(
    "arguments", [{"max_tokens": 0}, {"num_replicas": 0}, {"objective": "fastest"}, {"cost": {"pair": -1.0}}]
)
def test_bad_arguments_are_refused(arguments):
    with pytest.raises(ValueError, match="pair" if "cost" in arguments else next(iter(arguments))):
        if "cost" in arguments:
            CostModel(**arguments["cost"])
        plan_step([[1]], **arguments)


@pytest.mark.parametrize("windows", [False, True])
class TestHardCases:
    def test_more_replicas_than_microbatches(self, windows):
        sequences = [[1, 2, 3], [1, 2, 4], [5]]
        plan = plan_step(sequences, max_tokens=100, num_replicas=8, windows=windows)
        check_plan(plan, sequences, 100, 8)
        assert len(plan.slots) == 1 and len(plan.microbatches) == 3

    def test_all_trajectories_identical(self, windows):
        sequences = [np.arange(50)] * 200
        plan = plan_step(sequences, max_tokens=64, num_replicas=4, windows=windows)
        check_plan(plan, sequences, 64, 4)
        assert plan.compact_tokens == 50 and len(plan.microbatches) == 1

    def test_no_sharing_at_all(self, windows):
        sequences = [np.full(30, k) for k in range(64)]
        plan = plan_step(sequences, max_tokens=100, num_replicas=4, windows=windows)
        check_plan(plan, sequences, 100, 4)
        assert plan.compression == 1.0 and aligned(plan) and not plan.windows

    def test_one_trajectory(self, windows):
        plan = plan_step([[7, 8, 9]], max_tokens=3, num_replicas=2, windows=windows)
        assert plan.slots == ((Microbatch((0,), 3), None),) and plan.balance == 0.5

    def test_a_hundred_thousand_short_ones(self, windows):
        rng = np.random.default_rng(0)
        sequences = list(rng.integers(0, 50, (100_000, 12)))
        plan = plan_step(sequences, max_tokens=32768, num_replicas=8, windows=windows)
        assert sorted(i for m in plan.microbatches for i in m.trajectories) == list(range(100_000))
        assert max(map(max, plan.slot_rows)) <= 32768 and aligned(plan) and plan.balance > 0.98

    def test_one_long_episode_sampled_step_by_step(self, windows):
        tokens = np.arange(90_000)
        sequences = [tokens[: 300 * (k + 1)] for k in range(300)]
        if windows:
            plan = plan_step(sequences, max_tokens=32768, num_replicas=4, windows=True)
            assert [w.prefix_tokens for w in plan.windows] == [32768, 65536], "chunk boundaries: nothing is replayed"
            assert plan.producer_rows == (32768, 32768) and plan.microbatches[0].rows == 90_000 - 65536
        else:
            with pytest.warns(UserWarning, match="trajectory 299 has 90000 tokens.*, with 299 trajectories"):
                plan = plan_step(sequences, max_tokens=32768, num_replicas=4)
        assert plan.compact_tokens == 90_000
        assert plan_step(sequences, max_tokens=98304, windows=windows).compact_tokens == 90_000


def test_plans_do_not_depend_on_hashing():
    program = (
        "import numpy as np; from harts_hf.planning.microbatches import plan_step; rng = np.random.default_rng(0);"
        "s = [rng.integers(0, 3, rng.integers(1, 30)).tolist() for _ in range(300)]; print(plan_step(s, 200, 3, True))"
    )
    outputs = [
        subprocess.run([sys.executable, "-c", program], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True)
        for seed in ("1", "2")
    ]
    assert outputs[0].stdout == outputs[1].stdout


def test_measures_of_a_plan():
    slots = ((Microbatch((0,), 30, 0), Microbatch((1, 2), 50)), (Microbatch((3,), 20, 0), None))
    plan = StepPlan(slots, num_tokens=400, windows=(Window(0, 10, replica=0, consumers=(0, 1)),))
    assert plan.slot_rows == ((40, 50), (20, 0))
    assert plan.compact_tokens == 110 and plan.compression == 400 / 110
    assert plan.slot_balances == (0.9, 0.5) and plan.balance == 0.7
    assert plan.slot_critical_rows == 70 and plan.replica_critical_rows == 60
