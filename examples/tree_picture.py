"""Draw the prefix tree of rollouts: position to the right, one line per trajectory, a fork where they part."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from harts_hf import PrefixTree

SCORE_COLORS = "coolwarm_r"
SAMPLED_WIDTH, CONTEXT_WIDTH = 7.0, 2.5  # points


def draw_tree(
    path: Path,
    input_ids: Sequence[Sequence[int]],
    completion_masks: Sequence[Sequence[int]],
    scores: Sequence[float],
    score_name: str,
    labels: Sequence[str],
) -> None:
    """Save a picture of the tree of some trajectories.

    A stretch of tokens is drawn once, however many trajectories share it, in the colour of their mean score; thick
    where the model sampled the tokens, thin where they are context.

    Args:
        path (`Path`): file to write; its suffix gives the format.
        input_ids: token ids of each trajectory.
        completion_masks: for each trajectory, 1 where the token was sampled by the model.
        scores: what colours each trajectory.
        score_name (`str`): what the scores are, such as "reward".
        labels: what stands at the end of each trajectory.
    """
    tree = PrefixTree.from_sequences(input_ids)
    starts = tree.segment_starts()
    ends = np.append(starts[1:], tree.num_rows)  # one past the last row of each segment
    segment_of_row = np.repeat(np.arange(len(starts)), ends - starts)

    score_sum = np.zeros(len(starts))
    sampled = np.zeros(tree.num_rows, dtype=bool)
    lines: list[list[int]] = [[] for _ in starts]  # lines, from the top, of the trajectories of each segment
    line_of = np.empty(tree.num_trajectories, dtype=int)
    line_of[tree.sorted_order] = np.arange(tree.num_trajectories)
    for i in range(tree.num_trajectories):
        rows = tree.rows(i)
        sampled[rows[np.asarray(completion_masks[i], dtype=bool)]] = True
        for segment in np.unique(segment_of_row[rows]):
            score_sum[segment] += scores[i]
            lines[segment].append(int(line_of[i]))
    height = np.array([np.mean(members) for members in lines])
    mean_score = score_sum / tree.counts[starts]

    scale = Normalize(min(scores), max(max(scores), min(scores) + 1e-6))
    color = colormaps[SCORE_COLORS]
    stretches, colors, widths, forks = [], [], [], []
    for s, (start, end) in enumerate(zip(starts, ends, strict=True)):
        first = int(tree.position_ids[start])
        parent = int(tree.parent[start])
        if parent >= 0:
            forks.append([(first, height[segment_of_row[parent]]), (first, height[s])])
        cuts = np.flatnonzero(np.diff(sampled[start:end])) + 1
        bounds = [0, *cuts.tolist(), int(end - start)]
        for a, b in zip(bounds, bounds[1:], strict=False):
            stretches.append([(first + a, height[s]), (first + b, height[s])])
            colors.append(color(scale(mean_score[s])))
            widths.append(SAMPLED_WIDTH if sampled[start + a] else CONTEXT_WIDTH)

    figure = Figure(figsize=(12, 1.8 + 0.28 * tree.num_trajectories), layout="constrained")
    axes = figure.subplots()
    axes.add_collection(LineCollection(forks, colors="0.6", linewidths=1.0, zorder=1))
    axes.add_collection(LineCollection(stretches, colors=colors, linewidths=widths, capstyle="butt", zorder=2))
    for i, label in enumerate(labels):
        text = f"{label}  {score_name} {scores[i]:.3g}"
        end = (len(input_ids[i]), line_of[i])
        axes.annotate(text, end, (6, 0), textcoords="offset points", va="center", fontsize=7)
    longest = int(tree.lengths.max())
    axes.set_xlim(-0.01 * longest, 1.16 * longest)
    axes.set_ylim(tree.num_trajectories - 0.3, -0.7)
    axes.set_yticks([])
    axes.set_xlabel("token position")
    axes.set_ylabel("trajectories")
    axes.set_title(
        f"{tree.num_trajectories} trajectories, {tree.num_tokens:,} expanded tokens, "
        f"{tree.num_rows:,} rows computed, {tree.compression:.2f}x",
        fontsize=10,
    )
    axes.legend(
        handles=[
            Line2D([], [], color="0.3", linewidth=SAMPLED_WIDTH, label="sampled by the model (trained)"),
            Line2D([], [], color="0.3", linewidth=CONTEXT_WIDTH, label="context"),
            Line2D([], [], color="0.6", linewidth=1.0, label="fork"),
        ],
        loc="lower left",
        fontsize=8,
    )
    mappable = ScalarMappable(scale, color)
    figure.colorbar(mappable, ax=axes, label=f"mean {score_name}", pad=0.01, fraction=0.03)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
