"""A record of `end_to_end.py` that a later run adds variants to.

Speedups and differences of losses derive from the record's own Expanded, so both runs must have had the same device,
versions, options and steps.
"""

import json
from pathlib import Path

# What both runs must agree in; "command", "build_seconds", "seconds" and all that is measured may differ.
CONDITIONS = (
    "device",
    "versions",
    "seed",
    "dtype",
    "parameters",
    "layers",
    "experts_implementation",
    "modules",
    "recomputation",
    "rows",
    "window_cost_rows",
    "attention",
    "forward_flops",
)


def read_record(path: Path) -> dict:
    """A record as it was when it was written: trajectories are numbers again."""
    record = json.loads(path.read_text())
    for step in record["steps"].values():
        for entry in step["variants"].values():
            if "log_prob_sums" in entry:
                entry["log_prob_sums"] = {int(i): total for i, total in entry["log_prob_sums"].items()}
    return record


def extend_record(earlier: dict, new: dict) -> dict:
    """The earlier record, with the new run's command in `extended_by`.

    Args:
        earlier: what [`read_record`] returned; modified.
        new: the record of the run that begins, without any step.

    Raises:
        ValueError: a condition differs; the message names each and both values.
    """
    _refuse_differences({name: earlier.get(name) for name in CONDITIONS}, {name: new[name] for name in CONDITIONS})
    earlier.setdefault("extended_by", []).append(new["command"])
    return earlier


def add_step_facts(record: dict, name: str, facts: dict) -> None:
    """Add a step without variants to a record, or find that the record has the same.

    Raises:
        ValueError: the record has another step of that name.
    """
    known = record["steps"].setdefault(name, facts | {"variants": {}})
    _refuse_differences({key: known.get(key) for key in facts}, facts, f" in step {name}")


def _refuse_differences(earlier: dict, new: dict, where: str = "") -> None:
    differences = [f"{key} {earlier[key]!r} and {new[key]!r}" for key in new if earlier[key] != new[key]]
    if differences:
        raise ValueError(f"the record cannot be extended: it and this run differ{where}: {'; '.join(differences)}")
