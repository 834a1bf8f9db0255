"""The picture of fidelity.py's first part: divergence over the number of hand-offs."""

from collections.abc import Sequence
from pathlib import Path

from fidelity_runs import chain_run
from handoff_steps import LAYOUTS
from matplotlib.figure import Figure

PANELS = (
    ("symmetric_kl_mean", "symmetric KL, nats a token"),
    ("nll_difference_mean", "|difference of target NLL|, nats a token"),
)
COLORS = {"windows": "tab:blue", "forks": "tab:orange"}
NOISE = (
    ("expanded", "against_rerun", "Expanded, run again", ":"),
    ("expanded, batches of two", "against_expanded", "Expanded, batches of two", "-."),
)
EXPANDED = (("expanded", "against_fp32", "Expanded", ":"),)


def plot_handoffs(runs: dict, depths: Sequence[int], file: Path) -> None:
    """Draw four curves and the stock model's levels in each of two panels: against Expanded.

    Where they were run, two more show the same against a tree forward of each trajectory alone, which leaves out what
    the kernels of the stock model round otherwise, and two against Expanded in fp32.

    Args:
        runs: the record's, by name.
        depths: those that were run.
        file: its suffix says the format.
    """
    rows = [("against_expanded", "against Expanded", sorted(depths), NOISE)]
    if 0 in depths and len(depths) > 1:
        rows.append(("against_depth_0", "against a tree of one trajectory", sorted(set(depths) - {0}), NOISE))
    if "against_fp32" in runs["expanded"]:
        rows.append(("against_fp32", "against Expanded in fp32", sorted(depths), EXPANDED))
    figure = Figure(figsize=(10, 4 * len(rows)), layout="constrained")
    panels = figure.subplots(len(rows), 2, squeeze=False)
    for (against, title, places, levels), axes_of_row in zip(rows, panels, strict=True):
        for axes, (statistic, label) in zip(axes_of_row, PANELS, strict=True):
            for layout in LAYOUTS:
                for replay, line in ((True, "-"), (False, "--")):
                    values = [runs[chain_run(layout, d, replay)][against][statistic] for d in places]
                    name = f"{layout}, {'with' if replay else 'without'} replay"
                    axes.plot(places, values, line, marker="o", color=COLORS[layout], label=name)
            for run, pair, name, line in levels:
                value = runs[run][pair][statistic]
                axes.axhline(value, linestyle=line, color="gray", label=f"{name}: {value:.1e}")
            axes.set(title=title, xlabel="hand-offs, or forks, above the tokens", ylabel=label)
            axes.set(xticks=places, ylim=(0, None))
            axes.legend(fontsize="small", framealpha=0.5)
    figure.savefig(file, dpi=150)
