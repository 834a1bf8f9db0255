"""What several passes over a step say: the entry of a variant in the record of `end_to_end.py`."""

import statistics

from step_run import StepRun
from step_variants import StepRunner
from step_work import H200_FLOPS, ForwardFlops


def entry_of(runner: StepRunner, runs: list[StepRun], flops: ForwardFlops) -> dict:
    """Median seconds of the complete passes, and the first one's counts, efficiency and loss.

    Of the first pass alone if none is complete.
    """
    complete = [r for r in runs if r.is_complete]
    # The first pass may have ended early where a later one does not: kernels were compiled and tuned within it.
    reported = complete[0] if complete else runs[0]
    seconds = statistics.median(r.seconds for r in complete) if complete else reported.marks[-1]
    tokens = sum(len(runner.step.trajectories[i].token_ids) for i in reported.trajectories)
    return {
        "complete": reported.is_complete,
        "share_of_tokens": round(tokens / runner.step.num_tokens, 4),
        "seconds": round(seconds, 4),
        "complete_passes": [round(r.seconds, 4) for r in complete],
        "spread": round(spread(complete if len(complete) > 1 else runs), 4),
        "expanded_tokens": tokens,
        "expanded_tokens_per_second": round(tokens / seconds, 1),
        "microbatches": reported.microbatches,
        "rows_computed": reported.embedded_rows,
        "replay_tokens": reported.work.replay_tokens,
        "rounds": reported.work.rounds,
        "mfu": round(flops.model_flops(reported.work) / seconds / H200_FLOPS, 4),
        "hfu": round(flops.hardware_flops(reported.work) / seconds / H200_FLOPS, 4),
        "loss": runner.loss_of(reported.log_prob_sums),
        "log_prob_sums": dict(sorted(reported.log_prob_sums.items())),
        "loss_weights": [float(w) for w in -runner.step.advantages / runner.step.num_scored],
    }


def spread(runs: list[StepRun]) -> float:
    """Largest difference between passes up to the last microbatch that all have run, over the shortest."""
    last = min(len(r.marks) for r in runs) - 1
    times = [r.marks[last] for r in runs]
    return (max(times) - min(times)) / min(times)


def summary(entry: dict) -> str:
    """An entry on one line."""
    if "skipped" in entry:
        return f"skipped: {entry['skipped']}"
    share = "" if entry["complete"] else f", {100 * entry['share_of_tokens']:.0f}% of the step"
    return (
        f"{entry['seconds']:.2f} s, {entry['expanded_tokens_per_second']:,.0f} expanded tokens/s, "
        f"{entry['rows_computed']:,} rows, compression {entry['compression']:.2f}{share}"
    )
