"""What a step plan is worth: one record per plan, as a dict for JSON and as a table."""

import numpy as np

from .plan import StepPlan


def describe_plan(plan: StepPlan, step_minimum_rows: int, plan_seconds: float) -> dict:
    """Measures of a plan, all in rows, tokens or seconds.

    Args:
        plan: the plan.
        step_minimum_rows: rows of the whole step's tree, `PrefixTree.num_rows`: no plan computes fewer.
        plan_seconds: time that planning took, without building the tree.

    Returns:
        A dict of JSON types: what the plan was optimised for; expanded tokens, computed rows and their quotient, the
        compression; the step minimum; slot-critical and replica-critical rows; balance, its mean and its 5th
        percentile over slots; numbers of slots, replicas, microbatches and windows; the producers' rows; planning
        time.
    """
    return {
        "objective": plan.objective,
        "cost": plan.cost,
        "expanded_tokens": plan.num_tokens,
        "compact_rows": plan.compact_tokens,
        "compression": plan.compression,
        "step_minimum_rows": step_minimum_rows,
        "slot_critical_rows": plan.slot_critical_rows,
        "replica_critical_rows": plan.replica_critical_rows,
        "balance": plan.balance,
        "balance_p5": float(np.percentile(plan.slot_balances, 5)),
        "slots": len(plan.slots),
        "replicas": len(plan.slots[0]),
        "microbatches": len(plan.microbatches),
        "windows": len(plan.windows),
        "producer_rows": sum(plan.producer_rows),
        "plan_seconds": plan_seconds,
    }


def format_table(records: dict[str, dict]) -> str:
    """A table with a row for each measure and a column for each plan."""
    rows = [("", *records)]
    for name in next(iter(records.values())):
        cells = []
        for record in records.values():
            value = record[name]
            cells.append(f"{value:.4f}" if isinstance(value, float) else str(value))
        rows.append((name.replace("_", " "), *cells))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines)
