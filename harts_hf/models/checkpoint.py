"""Put a saved checkpoint's weights into a live model."""

import torch
from transformers import PreTrainedModel


def reload_weights(model: PreTrainedModel, folder: str) -> None:
    """Load the checkpoint in `folder`, as `save_pretrained` wrote it, into `model`, in place.

    Transformers 5.24 saves some architectures (`bailing_hybrid`, `kimi_linear`) under their hub names and converts on
    `from_pretrained`; `Trainer` resumes with `load_state_dict(strict=False)`, which skips those names with a warning
    and trains on from other weights. Here every name must match. A second copy of the weights, in fp32, is held
    meanwhile.

    Raises:
        RuntimeError: the checkpoint does not hold exactly the model's weights.
    """
    saved = type(model).from_pretrained(folder, dtype=torch.float32)  # exact for parameters of any narrower dtype
    model.load_state_dict(saved.state_dict())
