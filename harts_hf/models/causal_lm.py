"""The Transformers causal LM inside what a user gives."""

from transformers import PreTrainedModel

from .families import UnsupportedModelError


def causal_lm_of(model) -> PreTrainedModel:
    """The Transformers causal LM inside `model`, which may be a PEFT model.

    Raises:
        TypeError: `model` is neither.
        UnsupportedModelError: a PEFT method that adds virtual tokens (prompt learning).
    """
    if isinstance(model, PreTrainedModel):
        return model
    if any(kind.__module__.startswith("peft.") for kind in type(model).__mro__):  # FSDP2 derives a class of its own
        if model.active_peft_config.is_prompt_learning:
            raise UnsupportedModelError(
                f"{model.active_peft_config.peft_type} adds virtual tokens to each sequence; a tree forward supports "
                "adapters that leave the input as it is, such as LoRA"
            )
        return model.get_base_model()
    raise TypeError(
        f"expected a Transformers causal LM or a PEFT model around one, got {type(model).__name__}; call this before "
        "the model is wrapped"
    )
