"""Plans optimizer steps with a trainer's options: the trajectories of all ranks, one tree, one plan."""

import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from harts_hf.distributed.ranks import Ranks
from harts_hf.models.token_ids import check_token_ids
from harts_hf.planning.cost import CostModel
from harts_hf.planning.microbatches import plan_step
from harts_hf.planning.window_memory import WindowMemory
from harts_hf.tree import PrefixTree

from .grpo_config import WINDOW_COST_ROWS, TreeGRPOConfig
from .micro_batches import PlacedTrajectory
from .planned_step import PlannedStep, Shape, share_trajectories


class StepPlanner:
    """Plans the optimizer steps of one trainer.

    Args:
        options ([`TreeGRPOConfig`] or the class, which holds the defaults): how to plan.
        model: the causal LM that is trained; its config bounds token ids and says what a window keeps alive.
        device: of this rank.
        in_lockstep (`bool`): as for [`PlannedStep`].
    """

    def __init__(
        self,
        options: TreeGRPOConfig | type[TreeGRPOConfig],
        model: PreTrainedModel,
        device: torch.device,
        in_lockstep: bool,
    ):
        self._options = options
        self._config = model.config.get_text_config()
        self._device = device
        self._in_lockstep = in_lockstep
        window_cost = options.window_cost_rows
        self._cost = CostModel(producer=WINDOW_COST_ROWS.get(device.type, 0) if window_cost is None else window_cost)
        self._window_memory = None
        if options.max_window_gib is not None:
            self._window_memory = WindowMemory.from_config(
                self._config,
                int(options.max_window_gib * 2**30),
                dtype_bytes=model.dtype.itemsize,
                checkpoints=not options.offload_producers,
            )

    def plan(
        self,
        placed: Sequence[PlacedTrajectory],
        shapes: Sequence[Shape],
        *,
        alone: bool = False,
        without_unscored: bool = False,
    ) -> tuple[PlannedStep, float]:
        """Plan the trajectories of all ranks that plan together, and the seconds that took. Collective.

        Args:
            placed, shapes: of this rank, as for `share_trajectories`.
            alone: plan this rank's trajectories only, whatever the options say.
            without_unscored: leave out what trains nothing, unless that is all.
        """
        options = self._options
        ranks = Ranks(self._device, alone=alone or not options.exchange_trajectories)
        shared = share_trajectories(ranks, placed, shapes)
        plan_start = time.perf_counter()
        scored = [t for t in shared.trajectories if t.scored.any()]
        if without_unscored and scored:
            shared = replace(shared, trajectories=scored)
        tree = PrefixTree.from_sequences([t.token_ids for t in shared.trajectories])
        check_token_ids(tree, self._config)
        plan = plan_step(
            tree,
            options.max_tokens_per_microbatch,
            num_replicas=ranks.size,
            windows=options.sharing_windows,
            cost=self._cost,
            window_memory=self._window_memory,
        )
        return PlannedStep(ranks, shared, plan, self._in_lockstep), time.perf_counter() - plan_start
