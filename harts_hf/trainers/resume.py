"""Taking up a run from a checkpoint: which weights go into the model, and at which micro-step training goes on."""

import math
import warnings
from typing import Any

from transformers import PreTrainedModel
from transformers.trainer_utils import has_length
from trl.trainer.grpo_trainer import GRPOTrainer


def reloads_whole(trainer: GRPOTrainer, model) -> bool:
    """Whether a checkpoint's weights are put into `model` by `reload_weights`, all of them on each process.

    PEFT loads its adapters otherwise, FSDP its shards.

    Raises:
        NotImplementedError: the model was sharded while it was loaded.
    """
    if trainer.is_distributed_loading_by_transformers:
        raise NotImplementedError(
            "a model that was sharded while it was loaded cannot take a checkpoint's weights: give the checkpoint "
            "to load_sharded, and leave resume_from_checkpoint and load_best_model_at_end out"
        )
    return isinstance(model, PreTrainedModel) and not trainer.is_fsdp_enabled


def micro_steps_done(trainer: GRPOTrainer) -> int:
    """Micro-steps before `state.global_step`; the last optimizer step of an epoch may have fewer than others."""
    accumulation = trainer.args.gradient_accumulation_steps
    dataloader = trainer.callback_handler.train_dataloader
    if not has_length(dataloader):
        return trainer.state.global_step * accumulation
    epochs, steps = divmod(trainer.state.global_step, math.ceil(len(dataloader) / accumulation))
    return epochs * len(dataloader) + steps * accumulation


def warn_of_lost_generation(trainer: GRPOTrainer, micro_steps: int) -> None:
    """Warn where a run that resumes after `micro_steps` is inside a generation batch.

    A checkpoint does not hold the samples and old log-probs of that batch.
    """
    args: Any = trainer.args  # a GRPOConfig; Trainer's own type is wider
    has_old = "old_log_probs" in (getattr(trainer.train_dataset, "column_names", None) or ())
    generate_every = args.steps_per_generation * trainer.num_iterations
    if micro_steps % generate_every and not has_old:
        warnings.warn(
            f"resumed inside a generation batch, which serves {generate_every} micro-steps: its samples and old "
            "log-probs are made anew with the resumed policy, so the run differs from an uninterrupted one. Save "
            "where generation starts to avoid it.",
            stacklevel=3,
        )
