"""What a step saved, logged beside TRL's metrics."""

import torch

from harts_hf.execution import MicrobatchResult
from harts_hf.planning.plan import StepPlan


class TreeStatistics:
    """Collects the statistics of one planned step.

    Args:
        plan ([`StepPlan`]): the step's plan.
        plan_seconds (`float`): wall time of making it.

    Attributes:
        expert_loads (`[L, E]`, fp32, or `None`): expanded tokens that each expert of each MoE layer has received.
    """

    def __init__(self, plan: StepPlan, plan_seconds: float):
        self._plan = plan
        self._plan_seconds = plan_seconds
        self._replay_tokens = 0
        self._rounds = 0
        self.expert_loads: torch.Tensor | None = None

    def add(self, result: MicrobatchResult) -> None:
        """Count the replay, rounds and expert loads of a microbatch, or of a window's producer, that has run."""
        for rounds in result.batch.planned_rounds():
            self._replay_tokens += rounds.replay_tokens + result.batch.replayed_prefix_rows(rounds.chunk_size)
            self._rounds += rounds.num_rounds
        loads = result.output.expert_loads
        if loads is not None:
            self.expert_loads = loads if self.expert_loads is None else self.expert_loads + loads

    def log(self, metrics: dict[str, list[float]]) -> None:
        """Append one value per statistic to `metrics` (metric name -> values), under `tree/`.

        Rows, expanded and replay tokens, rounds, microbatches and sharing windows are sums over the step;
        `compression` is expanded tokens per row, `balance` that of [`StepPlan`], `expert_load_max_over_mean` a mean
        over the MoE layers.
        """
        plan = self._plan
        metrics["tree/compression"].append(plan.compression)
        metrics["tree/rows"].append(plan.compact_tokens)
        metrics["tree/expanded_tokens"].append(plan.num_tokens)
        metrics["tree/microbatches"].append(len(plan.microbatches))
        metrics["tree/windows"].append(len(plan.windows))
        metrics["tree/replay_tokens"].append(self._replay_tokens)
        metrics["tree/rounds"].append(self._rounds)
        metrics["tree/balance"].append(plan.balance)
        metrics["tree/plan_seconds"].append(self._plan_seconds)
        if self.expert_loads is not None:
            loads = self.expert_loads
            metrics["tree/expert_load_max_over_mean"].append((loads.amax(1) / loads.mean(1)).mean().item())
