"""Planners to compare with: OR-Tools CP-SAT with first-fit-decreasing, a token-budget batcher, random order.

Each returns the microbatches as lists of trajectories; `place_longest_first` puts them on slots and replicas.
"""

import time
from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from harts_hf.planning.cost import CostModel
from harts_hf.planning.units import Units
from harts_hf.tree import PrefixTree


@dataclass(frozen=True)
class SolverRun:
    """Microbatches of CP-SAT and how long it took.

    Attributes:
        bins: trajectories of each microbatch.
        seconds: wall time of first-fit-decreasing, building the model and solving.
        seconds_to_best: wall time until the last improvement over first-fit-decreasing; what a perfect stopping rule
            would have needed.
        first_fit_seconds: wall time of first-fit-decreasing alone.
        first_fit_bins: microbatches of first-fit-decreasing.
        status: the solver's status, or why it was not run.
        bound: the solver's lower bound of the total rows, `None` if it was not run.
    """

    bins: list[list[int]]
    seconds: float
    seconds_to_best: float
    first_fit_seconds: float
    first_fit_bins: int
    status: str
    bound: float | None


class _Filling:
    """A microbatch that is filled unit by unit and knows its compact work."""

    def __init__(self, units: Units):
        self.units, self.members, self.rows = units, [], 0

    def added(self, unit: int) -> int:
        at = bisect_left(self.members, unit)
        left = self.units.lcp(self.members[at - 1], unit) if at else 0
        right = self.units.lcp(unit, self.members[at]) if at < len(self.members) else 0
        return self.units.unit_rows[unit] - max(left, right)

    def add(self, unit: int, rows: int) -> None:
        self.members.insert(bisect_left(self.members, unit), unit)
        self.rows += rows


def first_fit_decreasing(units: Units, max_tokens: int) -> list[list[int]]:
    """Longest trajectory first, into the first microbatch whose compact work stays within the budget."""
    bins: list[_Filling] = []
    for unit in sorted(range(len(units)), key=lambda u: (-units.unit_rows[u], u)):
        for b in bins:
            rows = b.added(unit)
            if b.rows + rows <= max_tokens:
                b.add(unit, rows)
                break
        else:
            bins.append(_Filling(units))
            bins[-1].add(unit, units.unit_rows[unit])
    return [b.members for b in bins]


def ortools_plan(
    tree: PrefixTree, max_tokens: int, time_limit: float, workers: int, max_variables: int = 600_000
) -> SolverRun:
    """Assign trajectories to microbatches with CP-SAT, started from first-fit-decreasing.

    The model is exact over all assignments to as many microbatches as first-fit-decreasing needs: a Boolean for each
    (unit, microbatch) and (shared segment, microbatch), a segment is present where one of its units is; capacity and
    objective count present segments. Units are trajectories with their nested prefixes, a reduction given to the
    solver for free. Above `max_variables` Booleans the model is not built, and first-fit-decreasing is the answer.
    """
    begin = time.perf_counter()
    units = Units.from_tree(tree, CostModel())
    first_fit = first_fit_decreasing(units, max_tokens)
    first_fit_seconds = time.perf_counter() - begin
    segments = _segments(units)
    num_bins = len(first_fit)
    num_variables = num_bins * (len(units) + len(segments))
    if num_variables > max_variables:
        status = f"not run: {num_variables} Booleans"
        bins = [_trajectories(tree, units, b) for b in first_fit]
        return SolverRun(bins, first_fit_seconds, first_fit_seconds, first_fit_seconds, num_bins, status, None)

    model = cp_model.CpModel()
    hinted = {u: b for b, members in enumerate(first_fit) for u in members}
    x = [[model.new_bool_var("") for _ in range(num_bins)] for _ in range(len(units))]
    y = [[model.new_bool_var("") for _ in range(num_bins)] for _ in segments]
    children: list[list[int]] = [[] for _ in segments]
    leaf_of: list[list[int]] = [[] for _ in segments]
    tails = units.unit_rows.copy()
    for k, (_, _, parent, _) in enumerate(segments):
        if parent >= 0:
            children[parent].append(k)
    for unit, (segment, depth) in enumerate(_innermost(units, segments)):
        tails[unit] -= depth
        if segment >= 0:
            leaf_of[segment].append(unit)
    for u in range(len(units)):
        model.add_exactly_one(x[u])
        for b in range(num_bins):
            model.add_hint(x[u][b], int(hinted[u] == b))
    present = [{hinted[u] for u in range(start, end)} for start, end, _, _ in segments]
    for k in range(len(segments)):
        for b in range(num_bins):
            model.add_hint(y[k][b], int(b in present[k]))
    loads = []
    for b in range(num_bins):
        for k in range(len(segments)):
            for child in children[k]:
                model.add_implication(y[child][b], y[k][b])
            for u in leaf_of[k]:
                model.add_implication(x[u][b], y[k][b])
        load = sum(tails[u] * x[u][b] for u in range(len(units)))
        load += sum(segments[k][3] * y[k][b] for k in range(len(segments)))
        over = max((units.unit_rows[u] for u in first_fit[b]), default=0)
        model.add(load <= max(max_tokens, over))
        loads.append(load)
    model.minimize(sum(loads))

    class Clock(cp_model.CpSolverSolutionCallback):
        last = first_fit_seconds

        def on_solution_callback(self):
            Clock.last = time.perf_counter() - begin

    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit
    solver.parameters.num_workers = workers
    solver.parameters.random_seed = 0
    status = solver.solve(model, Clock())
    seconds = time.perf_counter() - begin
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bins = [[u for u in range(len(units)) if solver.boolean_value(x[u][b])] for b in range(num_bins)]
    else:
        bins = first_fit
    bins = [_trajectories(tree, units, b) for b in bins if b]
    return SolverRun(
        bins,
        seconds,
        Clock.last,
        first_fit_seconds,
        num_bins,
        solver.status_name(status),
        solver.best_objective_bound,
    )


def _segments(units: Units) -> list[tuple[int, int, int, int]]:
    """Shared segments: `(first unit, one past the last, parent or -1, rows)`, parents before children."""
    segments = []
    pending = [(0, len(units), -1, 0)]
    while pending:
        start, end, parent, above = pending.pop()
        if end - start < 2:
            continue
        middle = units.valley(start, end)
        depth = units.lcp(start, end - 1)
        if depth > above:
            segments.append((start, end, parent, depth - above))
            parent, above = len(segments) - 1, depth
        pending += [(start, middle, parent, above), (middle, end, parent, above)]
    return segments


def _innermost(units: Units, segments) -> list[tuple[int, int]]:
    """For each unit its innermost shared segment (-1 if none) and that segment's depth."""
    depth = []
    innermost = [(-1, 0)] * len(units)
    for k, (start, end, parent, rows) in enumerate(segments):
        depth.append(rows + (depth[parent] if parent >= 0 else 0))
        for u in range(start, end):
            if depth[k] > innermost[u][1]:
                innermost[u] = (k, depth[k])
    return innermost


def _trajectories(tree: PrefixTree, units: Units, members: list[int]) -> list[int]:
    return [int(i) for u in members for i in tree.sorted_order[units.first[u] : units.first[u + 1]]]


def token_budget(tree: PrefixTree, max_tokens: int) -> list[list[int]]:
    """Trajectories in the caller's order, a new microbatch when the sum of lengths would pass the budget."""
    bins: list[list[int]] = []
    filled = max_tokens + 1
    for i, length in enumerate(tree.lengths.tolist()):
        if filled + length > max_tokens:
            bins.append([])
            filled = 0
        bins[-1].append(i)
        filled += length
    return bins


def random_order(tree: PrefixTree, max_tokens: int, seed: int) -> list[list[int]]:
    """Trajectories in random order, a new microbatch when the compact work would pass the budget."""
    units = Units.from_tree(tree, CostModel())
    unit_of = np.searchsorted(units.first, np.argsort(tree.sorted_order), side="right") - 1
    bins: list[list[int]] = []
    filling = None
    for i in np.random.default_rng(seed).permutation(tree.num_trajectories).tolist():
        unit = int(unit_of[i])
        rows = 0
        if filling is not None and unit not in set(filling.members):
            rows = filling.added(unit)
        if filling is None or filling.rows + rows > max_tokens:
            bins.append([])
            filling = _Filling(units)
            rows = units.unit_rows[unit]
        if unit not in filling.members:
            filling.add(unit, rows)
        bins[-1].append(i)
    return bins


def place_longest_first(bins: list[list[int]], rows: list[int], num_replicas: int):
    """Longest first: sorted by work and cut into slots, in the evaluator's form."""
    order = sorted(range(len(bins)), key=lambda b: -rows[b])
    slots = []
    for first in range(0, len(order), num_replicas):
        slot = [(bins[b], None) for b in order[first : first + num_replicas]]
        slots.append(slot + [None] * (num_replicas - len(slot)))
    return slots
