"""The common program of a plan: alike on all replicas, and right on each."""

import numpy as np
import pytest
import torch
from forests import random_forest

from harts_hf.distributed.ranks import Ranks
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.plan import Microbatch, StepPlan, Window
from harts_hf.planning.program import Operation, plan_program
from harts_hf.trainers.micro_batches import PlacedTrajectory
from harts_hf.trainers.planned_step import PlannedStep, share_trajectories


def check_program(plan: StepPlan) -> int:
    """Assert what a program owes its plan; returns how many fillers all replicas run."""
    num_replicas = len(plan.slots[0])
    programs = [plan_program(plan, replica) for replica in range(num_replicas)]
    kinds = [[(step.kind, step.lane) for step in program] for program in programs]
    assert all(k == kinds[0] for k in kinds)
    needed = 0
    for replica, program in enumerate(programs):
        own = plan.of_replica(replica)
        assert [s.index for s in program if s.kind == "microbatch" and s.index is not None] == list(
            range(len(own.microbatches))
        )
        for kind in ("produce", "hand_back"):
            windows = [s.index for s in program if s.kind == kind and s.index is not None]
            assert sorted(windows) == list(range(len(own.windows)))
        is_open: list[tuple[int, int]] = []
        open_lanes = set()
        for step in program:
            if step.kind == "microbatch":
                if step.index is not None:
                    above = own.windows_above(own.microbatches[step.index].window)
                    assert tuple(w for w, _ in is_open) == above
            elif step.kind == "produce":
                assert step.lane not in open_lanes
                open_lanes.add(step.lane)
                if step.index is not None:
                    assert own.windows[step.index].parent == (is_open[-1][0] if is_open else None)
                    is_open.append((step.index, step.lane))
            else:
                open_lanes.remove(step.lane)
                if step.index is not None:
                    assert is_open.pop() == (step.index, step.lane)
        assert not open_lanes
        needed += sum(step.index is None for step in program)
    return needed


@pytest.mark.parametrize("seed", range(20))
def test_planned_steps(seed):
    rng = np.random.default_rng(seed)
    sequences = random_forest(rng, 8, max_trajectories=20)
    num_replicas = int(rng.integers(1, 5))
    plan = plan_step(sequences, int(rng.integers(8, 120)), num_replicas, windows=True)
    fillers = check_program(plan)
    assert num_replicas > 1 or fillers == 0


def test_intervals_that_cross():
    """Windows over slots 0 to 1 and 1 to 2 on two replicas, and one inside another over the same slots."""
    windows = (
        Window(0, 4, 0, (0, 1)),
        Window(0, 6, 0, (0, 1), parent=0),
        Window(3, 4, 1, (1, 2)),
    )
    slots = (
        (Microbatch((0,), 2, 1), None),
        (Microbatch((1,), 2, 1), Microbatch((3,), 2, 2)),
        (Microbatch((2,), 2), Microbatch((4,), 2, 2)),
    )
    plan = StepPlan(slots, 100, windows)
    assert check_program(plan) == 1 + 2 * 3  # a microbatch of replica 1, three lanes of a replica that lacks them
    order = [(step.kind, step.lane) for step in plan_program(plan, 0)]
    run = ("microbatch", -1)
    assert order == [
        *[("produce", 0), ("produce", 1), run],
        *[("produce", 2), run, ("hand_back", 1), ("hand_back", 0)],
        *[run, ("hand_back", 2)],
    ]


def test_nothing_to_run():
    slot = (None, Microbatch((0,), 3))
    assert plan_program(StepPlan((slot,), 3).of_replica(0)) == (Operation("microbatch", None),)


@pytest.mark.parametrize("other_differs", [False, True])
def test_ranks_with_different_plans_stop(other_differs):
    """What another rank would say of its plan is made up here."""

    class TwoRanks(Ranks):
        def gather(self, tensor):
            return [tensor, tensor + other_differs]

    ranks = TwoRanks(torch.device("cpu"), alone=True)
    trajectory = PlacedTrajectory(np.arange(2, 6), np.arange(4) > 0, 0, 0, -1)
    shared = share_trajectories(ranks, [trajectory], [(1, 3)])
    plan = plan_step([trajectory.token_ids], 100)
    if other_differs:
        with pytest.raises(RuntimeError, match="planned the same trajectories differently"):
            PlannedStep(ranks, shared, plan)
    else:
        assert PlannedStep(ranks, shared, plan).own_plan == plan
