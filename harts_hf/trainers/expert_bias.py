"""ExpertBiasCallback: router biases follow the experts' true loads, without an auxiliary loss."""

import torch
from transformers import TrainerCallback

from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.routing import expert_biases

from .grpo_trainer import TreeGRPOTrainer


class ExpertBiasCallback(TrainerCallback):
    """
    After each optimizer step, moves the bias by which a router chooses experts: up by `update_rate` for experts below
    the mean load of their layer, down for those above it (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    A load counts the tokens of all trajectories that are trained, of all processes: a shared row as often as
    trajectories share it. The biases choose experts and have no gradient; they are buffers of the model and are saved
    with it.

    Args:
        trainer ([`TreeGRPOTrainer`]):
            The trainer that gets the callback: `trainer.add_callback(ExpertBiasCallback(trainer))`.
        update_rate (`float`, *optional*, defaults to `0.001`):
            Change of a bias per optimizer step, in units of the router's scores; > 0.

    Raises:
        ValueError: `update_rate` is not positive, or only adapters are trained, whose checkpoints hold no bias.
        UnsupportedModelError: the model's routers have no correction bias.
    """

    def __init__(self, trainer: TreeGRPOTrainer, update_rate: float = 1e-3):
        if not update_rate > 0:
            raise ValueError(f"update_rate must be positive, got {update_rate}")
        model = trainer.accelerator.unwrap_model(trainer.model)
        base = causal_lm_of(model)
        if model is not base:
            raise ValueError("the router's biases belong to the base model, which adapter checkpoints do not hold")
        self.update_rate = update_rate
        self._trainer = trainer
        expert_biases(base)  # refuses a model without

    def on_step_end(self, args, state, control, **kwargs):
        loads = self._trainer.expert_loads
        assert loads is not None  # the model has routers, and a step has run
        loads = self._trainer.accelerator.reduce(loads, reduction="sum")  # [L, E]
        # Read at each step: what prepares a model for several processes puts new tensors in the place of buffers.
        biases = expert_biases(causal_lm_of(self._trainer.accelerator.unwrap_model(self._trainer.model)))
        with torch.no_grad():
            for bias, load in zip(biases, loads, strict=True):
                bias += self.update_rate * torch.sign(load.mean() - load).to(bias)
