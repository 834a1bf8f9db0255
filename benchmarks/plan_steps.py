"""Step planning on real rollouts against OR-Tools, a token-budget batcher and random order.

    HARTS_ROLLOUTS=... python benchmarks/plan_steps.py [--time-limit 60] [--only NAME]

HARTS_ROLLOUTS is a folder of rollout sets (`NAME.npz` and `rollouts.py`). Every plan is checked and counted by
`plan_evaluator.py`. L1 is planned for slot-critical work, the default, and for total work, which is what CP-SAT
minimises. For L1 with windows the record has the gain in compression over L1 and a cap of the gain that no plan with
work on every replica can pass. Lower bounds that hold for every plan without windows (`harts_hf/planning/bounds.py`)
stand beside the plans: of all rows, of all rows if every cell of L1's slots has a microbatch, of slot-critical rows.
Building the tree (median of three runs) and planning (one run) are timed apart, in one
thread, wall and CPU time. Writes `benchmarks/results/plan_steps.json`.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import ortools
from plan_comparators import ortools_plan, place_longest_first, random_order, token_budget
from plan_evaluator import count_rows, evaluate, of_step_plan

from harts_hf.planning.bounds import least_rows, least_slot_critical_rows
from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.units import Units
from harts_hf.tree import PrefixTree

SEED = 0
EXACT_UNITS = 16  # largest subtree that the bounds count exactly
REPLICAS = (1, 2, 4, 8, 64)
PLANS = {  # name -> windows, objective
    "l1": (False, "slot_critical"),
    "l1_compact_work": (False, "compact_work"),
    "l1_l2": (True, "slot_critical"),
}
# (set, form, budget): budgets above the longest trajectory, except where the name says so
STEPS = (
    ("swe_treestep_semisynthetic", "tree_step", 32768),
    ("swe_treestep_semisynthetic", "step_wise", 32768),
    ("swe_treestep_semisynthetic", "step_wise_without_thoughts", 32768),
    ("swe_bench_gemini3", "step_wise", 98304),
    ("swe_bench_gemini3", "step_wise_without_thoughts", 98304),
    ("swe_bench_gemini3", "step_wise_without_thoughts", 32768),  # 300 trajectories above the budget
    ("tau_bench_airline_gpt4o", "tree_step", 16384),
    ("tau_bench_airline_gpt4o", "step_wise", 16384),
    ("toolbench_dfs_tree", "tree_step", 4096),
    ("tot_game24_bfs_tree", "tree_step", 1024),
    ("hotpotqa_react", "step_wise", 4096),
    ("game24_cot_n100", "tree_step", 2048),
    ("humaneval_codegen16b", "tree_step", 2048),
)


def summary(evaluation, seconds: tuple[float, float]) -> dict:
    """Measures of an evaluated plan; `seconds` of wall and of CPU time."""
    balances = evaluation.balances
    return {
        "compression": round(evaluation.compression, 4),
        "total_rows": int(evaluation.rows.sum()),
        "slot_critical_rows": evaluation.slot_critical,
        "replica_critical_rows": int(evaluation.rows.sum(axis=0).max()),
        "slots": len(evaluation.rows),
        "balance": round(float(balances.mean()), 4),
        "balance_p5": round(float(np.percentile(balances, 5)), 4),
        "largest_rows": evaluation.largest,
        "seconds": round(seconds[0], 4),
        "cpu_seconds": round(seconds[1], 4),
    }


def timed(function, repeats: int = 3):
    """Result, and the median seconds of wall and of CPU time: the machine is shared, so they differ."""
    wall, cpu = [], []
    for _ in range(repeats):
        begin = time.perf_counter(), time.process_time()
        result = function()
        wall.append(time.perf_counter() - begin[0])
        cpu.append(time.process_time() - begin[1])
    return result, (statistics.median(wall), statistics.median(cpu))


def gain_of_windows(tree: PrefixTree, plain: dict, shared: dict, working_replicas: int) -> dict:
    """Gain in compression over L1, and its cap: every replica that works computes what all trajectories share."""
    common = int(tree.sorted_lcp[1:].min()) if tree.num_trajectories > 1 else 0
    least = tree.num_rows + (working_replicas - 1) * common
    return {
        "gain": round(plain["total_rows"] / shared["total_rows"], 4),
        "gain_cap": round(plain["total_rows"] / least, 4),
    }


def bounds_of_l1(units: Units, max_tokens: int, num_replicas: int, num_slots: int, least_total: int) -> dict:
    """Rows that plans without windows compute at least: with a microbatch in every cell, and along the slots."""
    num_cells = min(num_slots * num_replicas, len(units))
    return {
        "aligned_rows": least_rows(units, max_tokens, num_cells, EXACT_UNITS),
        "slot_critical_rows": least_slot_critical_rows(units, max_tokens, num_replicas, least_total),
    }


def run_step(sequences, max_tokens: int, time_limit: float, workers: int) -> dict:
    tree, build_seconds = timed(lambda: PrefixTree.from_sequences(sequences))
    units = Units.from_tree(tree, CostModel())
    begin = time.process_time()
    solver = ortools_plan(tree, max_tokens, time_limit, workers)
    solver_cpu_seconds = time.process_time() - begin
    budget_bins, budget_seconds = timed(lambda: token_budget(tree, max_tokens), 1)
    random_bins, random_seconds = timed(lambda: random_order(tree, max_tokens, SEED), 1)
    baselines = {
        "ortools_ffd": (solver.bins, (solver.seconds, solver_cpu_seconds)),
        "token_budget": (budget_bins, budget_seconds),
        "random_order": (random_bins, random_seconds),
    }
    baseline_rows = {
        name: [count_rows([sequences[i] for i in b]) for b in bins] for name, (bins, _) in baselines.items()
    }
    record = {
        "trajectories": tree.num_trajectories,
        "expanded_tokens": tree.num_tokens,
        "step_minimum_rows": tree.num_rows,
        "bound_rows_without_windows": least_rows(units, max_tokens, exact_units=EXACT_UNITS),
        "longest": int(tree.lengths.max()),
        "max_tokens": max_tokens,
        "tree_seconds": round(build_seconds[0], 4),
        "tree_cpu_seconds": round(build_seconds[1], 4),
        "ortools": {
            "status": solver.status,
            "bound_rows": solver.bound,
            "seconds": round(solver.seconds, 3),
            "seconds_to_best": round(solver.seconds_to_best, 3),
            "first_fit_seconds": round(solver.first_fit_seconds, 4),
            "first_fit_microbatches": solver.first_fit_bins,
        },
        "bounds_of_l1": {},
        "replicas": {},
    }
    for num_replicas in REPLICAS:
        plans = {}
        for name, (windows, objective) in PLANS.items():
            plan, seconds = timed(
                lambda w=windows, n=num_replicas, o=objective: plan_step(tree, max_tokens, n, w, objective=o), 1
            )
            result = evaluate(sequences, *of_step_plan(plan), max_tokens)
            assert result.rows.tolist() == [list(slot) for slot in plan.slot_rows], "the plan miscounts its rows"
            plans[name] = summary(result, seconds) | {"windows": len(plan.windows)}
            working = int((result.rows.sum(axis=0) > 0).sum())
        plans["l1_l2"] |= gain_of_windows(tree, plans["l1"], plans["l1_l2"], working)
        for name, (bins, seconds) in baselines.items():
            slots = place_longest_first(bins, baseline_rows[name], num_replicas)
            plans[name] = summary(evaluate(sequences, slots, [], max_tokens), seconds)
        least_total = record["bound_rows_without_windows"]
        bounds = bounds_of_l1(units, max_tokens, num_replicas, plans["l1"]["slots"], least_total)
        record["replicas"][str(num_replicas)] = plans
        record["bounds_of_l1"][str(num_replicas)] = bounds
        print(f"  DP {num_replicas:>2} bounds of L1: {bounds}")
        for name, plan in plans.items():
            print(
                f"  DP {num_replicas:>2} {name:<15} compression {plan['compression']:>8.3f}"
                f"  balance {plan['balance']:.4f} P5 {plan['balance_p5']:.4f}"
                f"  slots {plan['slots']:>4}  critical {plan['slot_critical_rows']:>9}"
                f"  {plan['seconds']:.3f} s, CPU {plan['cpu_seconds']:.3f} s",
                flush=True,
            )
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds given to CP-SAT for each step")
    parser.add_argument("--workers", type=int, default=2, help="threads given to CP-SAT")
    parser.add_argument("--only", default="", help="run the steps whose name contains this, and write no record")
    arguments = parser.parse_args()
    folder = Path(os.environ["HARTS_ROLLOUTS"])
    sys.path.insert(0, str(folder))
    import rollouts

    warnings.filterwarnings("ignore", message="trajectory")
    records = {}
    for name, form, max_tokens in STEPS:
        title = f"{name}/{form}/{max_tokens}"
        if arguments.only not in title:
            continue
        sequences = [s.tokens for s in getattr(rollouts, form)(rollouts.load(folder / f"{name}.npz"))]
        print(f"{title}: {len(sequences)} trajectories, {sum(map(len, sequences))} tokens", flush=True)
        records[title] = run_step(sequences, max_tokens, arguments.time_limit, arguments.workers)
    record = {
        "command": f"python benchmarks/plan_steps.py --time-limit {arguments.time_limit:g}, with $HARTS_ROLLOUTS",
        "device": f"{os.cpu_count()} CPU cores, {platform.machine()}; planning in one thread",
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "ortools": ortools.__version__},
        "seed": SEED,
        "ortools_time_limit_seconds": arguments.time_limit,
        "ortools_workers": arguments.workers,
        "steps": records,
    }
    if not arguments.only:
        path = Path(__file__).parent / "results" / "plan_steps.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
