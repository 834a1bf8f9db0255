"""Which model types have a tree forward, and the names of their seams in Transformers 5.24."""

from dataclasses import dataclass

from packaging.version import Version

TRANSFORMERS_MINOR = (5, 24)  # the seams below were read in this minor version


class UnsupportedModelError(ValueError):
    """The model, or one of its layers or options, has no tree forward."""


@dataclass(frozen=True)
class Family:
    """The seams of one architecture.

    Attributes:
        modeling_module (`str`): module whose functions the layers call.
        backbone (`str`): attribute path from the causal LM to the text decoder.
        linear_attention (`str` or `None`): "kda", "gated_delta_rule" or `None` for a softmax model.
        chunk_function (`str` or `None`): the module's chunkwise linear-attention function.
        layer_types (`tuple[str, ...]`): the entries of `config.layer_types` that are supported; the backbone then
            takes a dict of masks. Empty: the backbone takes one mask.
        safe_gate (`tuple[str, str]` or `None`): config entries of KDA's bounded gate: whether it is on, and its bound.
        router_class (`str` or `None`): the MoE router's class; it returns (logits, weights, indices of the experts).
        adds_aux_loss (`bool`): the causal LM adds the routers' auxiliary loss to its loss if the config's
            `output_router_logits` is on.
    """

    modeling_module: str
    backbone: str = "model"
    linear_attention: str | None = None
    chunk_function: str | None = None
    layer_types: tuple[str, ...] = ()
    safe_gate: tuple[str, str] | None = None
    router_class: str | None = None
    adds_aux_loss: bool = False

    def has_safe_gate(self, config) -> bool:
        """Whether the layers of this text config keep every log decay within [-5, 0]."""
        if self.safe_gate is None:
            return False
        is_on, lower_bound = (getattr(config, name) for name in self.safe_gate)
        return is_on and -5 <= lower_bound < 0


CONV_FUNCTION = "causal_conv1d_fn"
_HYBRID = ("full_attention", "linear_attention")
_GATED_DELTA = {
    "linear_attention": "gated_delta_rule",
    "chunk_function": "torch_chunk_gated_delta_rule",
    "layer_types": _HYBRID,
}
_KDA = {"linear_attention": "kda", "chunk_function": "chunk_kimi_delta_attention", "layer_types": _HYBRID}


def _module(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


FAMILIES: dict[str, Family] = {
    "bailing_hybrid": Family(
        _module("bailing_hybrid"),
        router_class="BailingHybridTopkRouter",
        safe_gate=("kda_safe_gate", "kda_lower_bound"),
        **_KDA,
    ),
    "kimi_linear": Family(_module("kimi_linear"), router_class="KimiLinearTopkRouter", **_KDA),
    "qwen3_next": Family(
        _module("qwen3_next"), router_class="Qwen3NextTopKRouter", adds_aux_loss=True, **_GATED_DELTA
    ),
    "qwen3_5_text": Family(_module("qwen3_5"), **_GATED_DELTA),
    "qwen3_5": Family(_module("qwen3_5"), backbone="model.language_model", **_GATED_DELTA),
    "qwen3_5_moe_text": Family(
        _module("qwen3_5_moe"), router_class="Qwen3_5MoeTopKRouter", adds_aux_loss=True, **_GATED_DELTA
    ),
    "qwen3_5_moe": Family(
        _module("qwen3_5_moe"),
        backbone="model.language_model",
        router_class="Qwen3_5MoeTopKRouter",
        adds_aux_loss=True,
        **_GATED_DELTA,
    ),
    "olmo_hybrid": Family(_module("olmo_hybrid"), **_GATED_DELTA),
    "qwen3": Family(_module("qwen3"), layer_types=("full_attention", "sliding_attention")),
    "qwen3_moe": Family(_module("qwen3_moe"), router_class="Qwen3MoeTopKRouter", adds_aux_loss=True),
    "llama": Family(_module("llama")),
}


def family_of(model) -> Family:
    """The family of a Transformers causal LM.

    Raises:
        UnsupportedModelError: the model type, a layer type or the rope type has no tree forward. The message names it
            and what is supported.
        ImportError: another minor version of Transformers is installed than the one the seams were read in.
    """
    import transformers

    if Version(transformers.__version__).release[:2] != TRANSFORMERS_MINOR:
        raise ImportError(
            f"harts_hf holds on to internals of transformers {'.'.join(map(str, TRANSFORMERS_MINOR))}, but "
            f"{transformers.__version__} is installed"
        )
    model_type = model.config.model_type
    if model_type not in FAMILIES:
        raise UnsupportedModelError(
            f"{type(model).__name__} has model type '{model_type}', which has no tree forward. Supported model types: "
            f"{', '.join(FAMILIES)}."
        )
    family = FAMILIES[model_type]
    config = model.config.get_text_config()
    if family.layer_types:
        unknown = sorted(set(config.layer_types) - set(family.layer_types))
        if unknown:
            raise UnsupportedModelError(
                f"{type(model).__name__} has layers of type {unknown}; a tree forward of '{model_type}' supports "
                f"{list(family.layer_types)}."
            )
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"rope type '{rope_type}' changes its frequencies with the length of the trajectory, so trajectories of "
            "different lengths share no rows. Use a checkpoint with default, linear, llama3 or yarn rope."
        )
    return family
