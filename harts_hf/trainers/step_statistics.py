"""What a step saved, logged beside TRL's metrics."""

import numpy as np
import torch

from harts_hf.execution import MicrobatchResult

from .planned_step import PlannedStep


class TreeStatistics:
    """Collects the statistics of one planned step.

    Args:
        step ([`PlannedStep`]): the step.
        plan_seconds (`float`): wall time of making its plan, without exchanging trajectories.

    Attributes:
        expert_loads (`[L, E]`, fp32, or `None`): expanded tokens that each expert of each MoE layer has received on
            this rank.
    """

    def __init__(self, step: PlannedStep, plan_seconds: float):
        self._step = step
        self._plan_seconds = plan_seconds
        self._replay_tokens = 0
        self._rounds = 0
        self.expert_loads: torch.Tensor | None = None

    def add(self, result: MicrobatchResult) -> None:
        """Count the replay, rounds and expert loads of a microbatch, or of a window's producer, that has run."""
        if result.microbatch.rows:  # else two rows that stand for nothing
            for rounds in result.batch.planned_rounds():
                self._replay_tokens += rounds.replay_tokens + result.batch.replayed_prefix_rows(rounds.chunk_size)
                self._rounds += rounds.num_rounds
        loads = result.output.expert_loads
        if loads is not None:
            self.expert_loads = loads if self.expert_loads is None else self.expert_loads + loads

    def log(self, metrics: dict[str, list[float]]) -> None:
        """Append one value per statistic to `metrics` (metric name -> values), under `tree/`. Collective.

        Rows, expanded and replay tokens, rounds, microbatches and sharing windows are sums over the step;
        `compression` is expanded tokens per row, `balance` that of [`StepPlan`] and `balance_p5` the 5th percentile of
        its slots, `expert_load_max_over_mean` a mean over the MoE layers. `exchange_bytes` is what all ranks received
        of each other, `plan_seconds` and `exchange_seconds` are the longest of a rank. A step is that of all ranks
        that plan together, and its values are the same on each.
        """
        plan, ranks = self._step.plan, self._step.ranks
        sums = torch.tensor([self._replay_tokens, self._rounds, ranks.received_bytes], dtype=torch.int64)
        replay_tokens, rounds, exchange_bytes = torch.stack(ranks.gather(sums)).sum(0).tolist()
        seconds = torch.tensor([self._plan_seconds, ranks.seconds], dtype=torch.float64)
        plan_seconds, exchange_seconds = torch.stack(ranks.gather(seconds)).amax(0).tolist()
        metrics["tree/compression"].append(plan.compression)
        metrics["tree/rows"].append(plan.compact_tokens)
        metrics["tree/expanded_tokens"].append(plan.num_tokens)
        metrics["tree/microbatches"].append(len(plan.microbatches))
        metrics["tree/windows"].append(len(plan.windows))
        metrics["tree/replay_tokens"].append(replay_tokens)
        metrics["tree/rounds"].append(rounds)
        metrics["tree/balance"].append(plan.balance)
        metrics["tree/balance_p5"].append(float(np.percentile(plan.slot_balances, 5)))
        metrics["tree/plan_seconds"].append(plan_seconds)
        if ranks.size > 1:
            metrics["tree/exchange_bytes"].append(exchange_bytes)
            metrics["tree/exchange_seconds"].append(exchange_seconds)
        if self.expert_loads is not None:
            loads = ranks.sum(self.expert_loads)
            metrics["tree/expert_load_max_over_mean"].append((loads.amax(1) / loads.mean(1)).mean().item())
