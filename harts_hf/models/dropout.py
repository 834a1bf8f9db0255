"""Dropout is refused: a shared row would get one mask instead of one per trajectory."""

import torch
from transformers import PreTrainedModel

from .families import UnsupportedModelError


def refuse_dropout(model: PreTrainedModel) -> None:
    """Raise if some dropout of the model is above zero, whatever mode it is in.

    Raises:
        UnsupportedModelError: names the module or config entry and its probability.
    """
    probability = getattr(model.config.get_text_config(), "attention_dropout", 0.0)
    if probability:
        raise UnsupportedModelError(f"attention_dropout is {probability}: set it to 0 in the model's config")
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
            raise UnsupportedModelError(
                f"{name} drops activations with probability {module.p}: set it to 0 (for LoRA: lora_dropout=0)"
            )
        if type(module).__module__.startswith("peft.tuners"):  # LoKr, LoHa, OFT keep theirs as numbers per adapter
            for kind in ("rank_dropout", "module_dropout", "alpha_dropout"):
                of_adapters = module.__dict__.get(kind)
                if isinstance(of_adapters, dict) and any(of_adapters.values()):
                    raise UnsupportedModelError(f"{name} has {kind} {of_adapters}: set it to 0")
