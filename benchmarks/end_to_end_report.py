"""Figures that follow from the measurements of `end_to_end.py`, its table and its plot."""

from pathlib import Path

TOLERANCE = {"bfloat16": 2e-3, "float32": 1e-5}  # of a difference of losses, over the sum of their terms' sizes


def derive(record: dict) -> None:
    """Add compression, speedup, efficiency, planning's share and differences of losses to the record's variants."""
    for step in record["steps"].values():
        measured = {name: entry for name, entry in step["variants"].items() if "skipped" not in entry}
        expanded = measured.get("expanded")
        for name, entry in measured.items():
            entry["compression"] = round(entry["expanded_tokens"] / entry["rows_computed"], 4)
            if "plan_seconds" in entry:
                # Both are of the whole plan, and trees are built inside of the step's seconds.
                plan, trees = (entry[key] * entry["share_of_tokens"] for key in ("plan_seconds", "tree_seconds"))
                entry["planning_share"] = round((plan + trees) / (plan + entry["seconds"]), 4)
            if expanded is None or name == "expanded":
                continue
            speedup = entry["expanded_tokens_per_second"] / expanded["expanded_tokens_per_second"]
            with_replay = entry["expanded_tokens"] / (entry["rows_computed"] + entry["replay_tokens"])
            entry["speedup_over_expanded"] = round(speedup, 4)
            entry["efficiency"] = round(speedup / entry["compression"], 4)
            entry["token_ratio_with_replay"] = round(with_replay, 4)
            entry["efficiency_with_replay"] = round(speedup / with_replay, 4)
            entry["loss_difference"] = _loss_difference(entry, expanded)


def _loss_difference(entry: dict, expanded: dict) -> float | None:
    """Difference of the losses over the trajectories that both have run, over the sum of the terms' sizes."""
    weights = entry["loss_weights"]
    both = entry["log_prob_sums"].keys() & expanded["log_prob_sums"].keys()
    terms = [(weights[i] * entry["log_prob_sums"][i], weights[i] * expanded["log_prob_sums"][i]) for i in sorted(both)]
    scale = sum(abs(b) for _, b in terms)
    return sum(a - b for a, b in terms) / scale if scale else None


def wrong_losses(record: dict) -> list[str]:
    """Variants whose loss differs from Expanded's by more than rounding."""
    bound = TOLERANCE[record["dtype"]]
    return [
        f"{set_name} {name}: {entry['loss_difference']:.1e}"
        for set_name, step in record["steps"].items()
        for name, entry in step["variants"].items()
        if entry.get("loss_difference") is not None and not abs(entry["loss_difference"]) <= bound
    ]


COLUMNS = (
    ("tokens/s", "expanded_tokens_per_second", "{:,.0f}"),
    ("seconds", "seconds", "{:.2f}"),
    ("spread", "spread", "{:.1%}"),
    ("rows", "rows_computed", "{:,}"),
    ("compression", "compression", "{:.2f}"),
    ("speedup", "speedup_over_expanded", "{:.2f}"),
    ("efficiency", "efficiency", "{:.3f}"),
    ("with replay", "efficiency_with_replay", "{:.3f}"),
    ("mfu", "mfu", "{:.1%}"),
    ("hfu", "hfu", "{:.1%}"),
    ("peak GiB", "peak_bytes", "{:.1f}"),
    ("planning", "planning_share", "{:.1%}"),
    ("loss diff.", "loss_difference", "{:.0e}"),
)


def print_table(record: dict) -> None:
    """Print a line for each variant of each set."""
    for set_name, step in record["steps"].items():
        remark = f" ({step['remark']})" if step["remark"] else ""
        print(f"\n{set_name}{remark}: {step['trajectories']} trajectories, {step['expanded_tokens']:,} tokens")
        print(f"{'':<16}" + "".join(f"{title:>13}" for title, _, _ in COLUMNS))
        for name, entry in step["variants"].items():
            if "skipped" in entry:
                print(f"{name:<16}  {entry['skipped'][:120]}")
                continue
            share = "" if entry["complete"] else f"  ({entry['share_of_tokens']:.0%} of the step)"
            print(f"{name:<16}" + "".join(f"{_cell(entry, key, form):>13}" for _, key, form in COLUMNS) + share)
    for name, profile in record.get("profiles", {}).items():
        if "failed" in profile:
            continue
        parts = ", ".join(f"{part} {seconds:.3f}" for part, seconds in profile["by_component"].items())
        times = f"{profile['seconds']:.2f} s, {profile['gpu_seconds']:.2f} s on the GPU"
        print(f"\n{profile['microbatches']} microbatches of {name}: {times}: {parts}")


def _cell(entry: dict, key: str, form: str) -> str:
    value = entry.get(key)
    if value is None:
        return "-"
    return form.format(value / 2**30 if key == "peak_bytes" else value)


def plot(record: dict, path: Path) -> None:
    """Draw expanded tokens per second of each variant over compression, a panel for each set."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = record["steps"]
    figure, axes = plt.subplots(1, len(steps), figsize=(3.4 * len(steps), 3.2), squeeze=False, layout="constrained")
    for axis, (set_name, step) in zip(axes[0], steps.items(), strict=True):
        measured = {name: entry for name, entry in step["variants"].items() if "skipped" not in entry}
        for name, entry in measured.items():
            axis.plot(entry["compression"], entry["expanded_tokens_per_second"] / 1e3, "o", label=name)
        if "expanded" in measured:
            rate = measured["expanded"]["expanded_tokens_per_second"] / 1e3
            most = max(entry["compression"] for entry in measured.values())
            axis.plot([0, most], [0, rate * most], "--", color="gray", linewidth=1, label="expanded, scaled")
        axis.set_title(set_name, fontsize=9)
        axis.set_xlabel("compression")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
    axes[0][0].set_ylabel("thousand expanded tokens/s")
    axes[0][-1].legend(fontsize=7)
    figure.savefig(path, dpi=150)
    plt.close(figure)
