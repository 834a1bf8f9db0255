"""`harts-hf`: what prefix sharing gains on given rollouts, and what the planner's cost model costs on a device.

    harts-hf plan ROLLOUTS --max-tokens 32768 --replicas 8
    harts-hf calibrate MODEL

`plan` needs numpy alone, its picture matplotlib.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
import time
from pathlib import Path

import numpy as np

from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.plan import OBJECTIVES, StepPlan
from harts_hf.planning.report import describe_plan, format_table
from harts_hf.planning.window_memory import WindowMemory
from harts_hf.tree import PrefixTree


def main(arguments: list[str] | None = None) -> None:
    """Entry point; `arguments` default to the command line's."""
    parser = argparse.ArgumentParser(prog="harts-hf", description="Prefix sharing for RL rollouts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_plan(commands)
    _add_calibrate(commands)
    parsed = parser.parse_args(arguments)
    try:
        parsed.run(parsed)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _add_plan(commands) -> None:
    plan = commands.add_parser("plan", help="plan one optimizer step of these rollouts and report what sharing gains")
    plan.add_argument("rollouts", type=Path, help=".jsonl or .jsonl.gz of `input_ids`, or .npz of `tokens`, `offsets`")
    plan.add_argument("--samples", choices=("trajectories", "turns"), default="trajectories")
    plan.add_argument("--max-tokens", type=int, default=32768, help="most rows that a replica runs in a slot")
    plan.add_argument("--replicas", type=int, default=1, help="data-parallel replicas")
    plan.add_argument("--objective", choices=OBJECTIVES, default="slot_critical", help="what plans are compared by")
    plan.add_argument(
        "--calibration", type=Path, help="cost model written by `harts-hf calibrate --json`; default: rows"
    )
    plan.add_argument("--model", help="bound windows by this model's config (a folder or a hub name)")
    plan.add_argument("--window-gib", type=float, help="memory of a window on a replica, with --model; default: 8")
    plan.add_argument("--json", type=Path, help="write the measures here")
    plan.add_argument("--picture", type=Path, help="write a Gantt picture of the plan with windows here (.png, .svg)")
    plan.set_defaults(run=_run_plan)


def _add_calibrate(commands) -> None:
    calibrate = commands.add_parser("calibrate", help="measure the planner's cost model on this device")
    calibrate.add_argument("model", help="folder or hub name of a model config; weights are random")
    calibrate.add_argument("--device", default="cuda")
    calibrate.add_argument("--rows", type=int, default=16384, help="rows of the largest measured microbatch")
    calibrate.add_argument("--json", type=Path, help="write the coefficients here")
    calibrate.set_defaults(run=_run_calibrate)


def _run_plan(arguments: argparse.Namespace) -> None:
    sequences = read_rollouts(arguments.rollouts, arguments.samples)
    begin = time.perf_counter()
    tree = PrefixTree.from_sequences(sequences)
    tree_seconds = time.perf_counter() - begin
    options = {"objective": arguments.objective}
    if arguments.calibration:
        options["cost"] = _read_cost_model(arguments.calibration)
    if arguments.window_gib is not None and not arguments.model:
        raise ValueError("--window-gib needs --model, whose config says what a window takes")
    if arguments.model:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(arguments.model).get_text_config()
        window_gib = 8.0 if arguments.window_gib is None else arguments.window_gib
        options["window_memory"] = WindowMemory.from_config(config, int(window_gib * 2**30))
    records, plans = {}, {}
    for name, windows in (("without windows", False), ("with windows", True)):
        begin = time.perf_counter()
        plans[name] = plan_step(tree, arguments.max_tokens, arguments.replicas, windows, **options)
        records[name] = describe_plan(plans[name], tree.num_rows, time.perf_counter() - begin)
    print(f"{tree.num_trajectories} trajectories, {tree.num_tokens} tokens; tree built in {tree_seconds:.3f} s")
    print(format_table(records))
    if arguments.json:
        result = {
            "rollouts": arguments.rollouts.name,
            "samples": arguments.samples,
            "max_tokens": arguments.max_tokens,
        }
        result |= {"tree_seconds": tree_seconds, "plans": records}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    if arguments.picture:
        draw_plan(plans["with windows"], arguments.picture)


def _run_calibrate(arguments: argparse.Namespace) -> None:
    from harts_hf.calibration import calibrate

    result = calibrate(arguments.model, arguments.device, arguments.rows)
    print(json.dumps(result, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def read_rollouts(path: Path, samples: str) -> list[np.ndarray]:
    """Token ids of each training sample.

    Args:
        path: `.jsonl` or `.jsonl.gz`, one object with `input_ids` a line; or `.npz` with `tokens` (all trajectories
            joined) and `offsets`, and `turn_ptr` (turns of a trajectory) and `turn_end` if samples are turns.
        samples: `"trajectories"`, one sample each; `"turns"`, one sample a model turn, with the whole prefix before
            it.

    Raises:
        ValueError: a line that is no JSON object with `input_ids`, offsets or turns that do not fit the tokens, or
            samples that the file does not tell.
    """
    if path.suffix == ".npz":
        return _read_arrays(path, samples)
    if samples != "trajectories":
        raise ValueError("--samples turns needs an .npz file, which says where turns end")
    opened = gzip.open(path, "rt") if path.suffix == ".gz" else open(path)
    with opened as lines:
        return [_token_ids(line, f"{path}, line {i}") for i, line in enumerate(lines, start=1) if line.strip()]


def _read_arrays(path: Path, samples: str) -> list[np.ndarray]:
    data = np.load(path)
    names = ("tokens", "offsets") if samples == "trajectories" else ("tokens", "offsets", "turn_ptr", "turn_end")
    if missing := [name for name in names if name not in data]:
        raise ValueError(f"{path} has no array {', '.join(missing)}; samples of {samples} need {', '.join(names)}")
    tokens, offsets = data["tokens"], data["offsets"]
    _require_offsets(f"{path}, offsets", offsets, len(tokens))
    if samples == "trajectories":
        return [tokens[a:b] for a, b in itertools.pairwise(offsets)]
    turns, ends = data["turn_ptr"], data["turn_end"]
    _require_offsets(f"{path}, turn_ptr", turns, len(ends))
    if len(turns) != len(offsets) or (ends > np.repeat(np.diff(offsets), np.diff(turns))).any():
        raise ValueError(f"{path}: turn_ptr and turn_end must give turns that end within each of its trajectories")
    return [
        tokens[offsets[e] : offsets[e] + ends[turn]]
        for e in range(len(offsets) - 1)
        for turn in range(turns[e], turns[e + 1])
    ]


def _require_offsets(place: str, offsets: np.ndarray, total: int) -> None:
    if offsets[0] != 0 or offsets[-1] != total or (np.diff(offsets) < 0).any():
        raise ValueError(f"{place}: must rise from 0 to {total}, the number of entries they divide")


def _read_cost_model(path: Path) -> CostModel:
    known = {field.name for field in dataclasses.fields(CostModel)}
    record = json.loads(path.read_text())
    coefficients = record.get("cost_model") if isinstance(record, dict) else None
    if not isinstance(coefficients, dict) or not coefficients.keys() <= known:
        raise ValueError(
            f"{path}: expected the output of `harts-hf calibrate --json`, with a `cost_model` of {sorted(known)}"
        )
    return CostModel(**coefficients)


def _token_ids(line: str, place: str) -> np.ndarray:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place}: {error}") from error
    if not isinstance(record, dict) or "input_ids" not in record:
        found = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ValueError(f"{place}: expected an object with `input_ids`, token ids of one sample, found {found}")
    ids = record["input_ids"]
    if not isinstance(ids, list) or not all(type(token_id) is int for token_id in ids):
        raise ValueError(f"{place}: input_ids must be a list of integers")
    return np.asarray(ids, dtype=np.int64)


def draw_plan(plan: StepPlan, path: Path) -> None:
    """Gantt picture: a line for each replica, slots from left to right, each as wide as its heaviest replica."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    num_replicas = len(plan.slots[0])
    figure, axes = plt.subplots(figsize=(12, 1.5 + 0.3 * num_replicas))
    colours = plt.get_cmap("tab20").colors
    producers: dict[tuple[int, int], int] = {}
    for window, produced in zip(plan.windows, plan.producer_rows, strict=True):
        cell = (window.consumers[0], window.replica)
        producers[cell] = producers.get(cell, 0) + produced
    start = 0
    for s, (slot, rows) in enumerate(zip(plan.slots, plan.slot_rows, strict=True)):
        for replica, microbatch in enumerate(slot):
            if microbatch is None:
                continue
            at = start
            plain = microbatch.window is None
            colour = "0.75" if plain else colours[microbatch.window % len(colours)]
            produced = producers.get((s, replica), 0)
            if produced:
                axes.barh(replica, produced, left=at, color=colour, edgecolor="black", hatch="///", linewidth=0.5)
                at += produced
            axes.barh(replica, microbatch.rows, left=at, color=colour, edgecolor="black", linewidth=0.5)
        start += max(rows)
        axes.axvline(start, color="black", linewidth=0.4)
    axes.set_yticks(range(0, num_replicas, 1 + num_replicas // 33))
    axes.invert_yaxis()
    axes.set_xlim(0, start)
    axes.set_xlabel("rows (vertical lines: slots)")
    axes.set_ylabel("replica")
    axes.set_title(
        f"compression {plan.compression:.2f}, balance {plan.balance:.1%}, {len(plan.windows)} windows"
        " (hatched: producer; one colour: its consumers; grey: no window)",
        fontsize=9,
    )
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
