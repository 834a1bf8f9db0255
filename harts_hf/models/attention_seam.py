"""The softmax-attention seam: the entry of Transformers' attention interface that the user chose, wrapped once."""

import functools

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from harts_hf.batch import CompactBatch
from harts_hf.kernels.tree_attention import tree_attention

from .boundary_seam import hand_over
from .families import UnsupportedModelError


def install_attention_seam(implementation: str | None) -> None:
    """Wrap one entry of the attention interface; does nothing where that is done already.

    Args:
        implementation: the config's `_attn_implementation`; Transformers takes None as eager.

    Raises:
        UnsupportedModelError: eager attention, which does not go through the interface.
    """
    if implementation is None or implementation == "eager":
        raise UnsupportedModelError(
            "eager attention is a function of each modeling file and has no tree version: load the model with "
            "attn_implementation='sdpa'"
        )
    original = ALL_ATTENTION_FUNCTIONS[implementation]
    if not isinstance(original, _AttentionSeam):
        ALL_ATTENTION_FUNCTIONS[implementation] = _AttentionSeam(original)


class _AttentionSeam:
    """An attention function that runs the tree version when the model was called with a compact batch."""

    def __init__(self, original):
        functools.update_wrapper(self, original)
        self.original = original

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,  # [1, H, C, K]
        key: torch.Tensor,
        value: torch.Tensor,  # [1, Hkv, C, V]
        attention_mask: torch.Tensor | None,
        *args,
        harts_batch: CompactBatch | None = None,
        harts_layer: int | None = None,
        harts_attention: str | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, None]:
        if harts_batch is None:
            return self.original(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("dropout", 0.0) > 0.0:
            raise UnsupportedModelError(
                "attention dropout would give a shared row one mask instead of one per trajectory: set it to 0"
            )
        if kwargs.get("softcap") is not None or kwargs.get("s_aux") is not None:
            raise UnsupportedModelError("tree attention supports neither a soft cap nor attention sinks")
        if harts_layer is None:
            raise UnsupportedModelError(f"{type(module).__name__} was not told the number of its layer")
        key = hand_over(harts_batch, harts_layer, "key", key, dim=2)
        value = hand_over(harts_batch, harts_layer, "value", value, dim=2)
        output = tree_attention(
            query,
            key,
            value,
            harts_batch.attention_layout(),
            scale=kwargs["scaling"],
            window=kwargs.get("sliding_window"),
            implementation=harts_attention,
        )
        return output, None  # [1, C, H, V]
