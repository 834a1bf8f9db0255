"""WindowMemory: bytes that a sharing window keeps alive, from a model's config.

While a window's consumers run, its boundary waits as leaves with gradients, and the producer keeps its checkpoints for
its backward. Per prefix row: K and V, or MLA's latent, of each softmax layer and their gradients; the log-probs of the
shared tokens and theirs; the residual stream at each layer's checkpoint. Per window: each linear layer's fp32 state at
the boundary and the last conv inputs, with their gradients. Consumers run one after another, so a replica has one
window alive at a time.
"""

from dataclasses import dataclass

FP32_BYTES = 4


@dataclass(frozen=True)
class WindowMemory:
    """What a window costs and how much it may.

    Attributes:
        max_bytes (`int`): most bytes that a window may keep alive on a replica.
        row_bytes (`int`): bytes for each row of the shared prefix.
        boundary_bytes (`int`): bytes that do not depend on the prefix's length.
    """

    max_bytes: int
    row_bytes: int
    boundary_bytes: int

    @property
    def max_prefix_tokens(self) -> int:
        """Longest prefix whose window fits `max_bytes`; 0 if not even an empty one does."""
        return max(0, (self.max_bytes - self.boundary_bytes) // self.row_bytes)

    def window_bytes(self, prefix_tokens: int) -> int:
        """Bytes that a window with this prefix keeps alive."""
        return self.boundary_bytes + prefix_tokens * self.row_bytes

    @classmethod
    def from_config(cls, config, max_bytes: int, *, dtype_bytes: int = 2, checkpoints: bool = True) -> "WindowMemory":
        """Read the layers' sizes from a text model's Transformers config.

        Args:
            config: `PreTrainedConfig` of the text model, of a type in `SOFTMAX_WIDTH`.
            max_bytes: most bytes that a window may keep alive on a replica.
            dtype_bytes: bytes of an activation, 2 for bf16.
            checkpoints: the producer is run with activation recomputation and keeps one hidden state per layer.
                Without it the producer keeps all its activations, which no config tells: use `WindowMemory` with
                measured bytes.

        Raises:
            ValueError: a model type outside of the table.
        """
        if config.model_type not in SOFTMAX_WIDTH:
            known = ", ".join(sorted(SOFTMAX_WIDTH))
            raise ValueError(
                f"no window memory for model type {config.model_type!r}; known: {known}. "
                "Give WindowMemory(max_bytes, row_bytes, boundary_bytes) instead"
            )
        linear_layers = 0
        if config.model_type in LINEAR_SIZES:
            linear_layers = list(config.layer_types).count("linear_attention")
        softmax_layers = config.num_hidden_layers - linear_layers
        leaf = 2  # a leaf and its gradient
        row_bytes = leaf * softmax_layers * SOFTMAX_WIDTH[config.model_type](config) * dtype_bytes + leaf * FP32_BYTES
        if checkpoints:
            row_bytes += config.num_hidden_layers * config.hidden_size * dtype_bytes
        boundary_bytes = 0
        if linear_layers:
            state, conv_channels = LINEAR_SIZES[config.model_type](config)
            conv_inputs = (config.linear_conv_kernel_dim - 1) * conv_channels
            boundary_bytes = leaf * linear_layers * (state * FP32_BYTES + conv_inputs * dtype_bytes)
        return cls(max_bytes=max_bytes, row_bytes=row_bytes, boundary_bytes=boundary_bytes)


def _latent(config) -> int:
    """MLA keeps the latent and the shared rotary key."""
    return config.kv_lora_rank + config.qk_rope_head_dim


def _keys_and_values(config) -> int:
    return 2 * config.num_key_value_heads * config.head_dim


def _kda_sizes(config) -> tuple[int, int]:
    width = config.linear_num_heads * config.linear_head_dim
    return width * config.linear_head_dim, 3 * width


def _gated_delta_sizes(config) -> tuple[int, int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return values * config.linear_key_head_dim, 2 * keys + values


# Model type -> elements that a softmax layer keeps for each row.
SOFTMAX_WIDTH = {
    "bailing_hybrid": _latent,
    "kimi_linear": _latent,
    "deepseek_v3": _latent,
    "qwen3_next": _keys_and_values,
    "qwen3_5_text": _keys_and_values,
    "qwen3_5_moe_text": _keys_and_values,
    "qwen3": _keys_and_values,
}

# Model type -> elements of a linear layer's state, and channels of its conv.
LINEAR_SIZES = {
    "bailing_hybrid": _kda_sizes,
    "kimi_linear": _kda_sizes,
    "qwen3_next": _gated_delta_sizes,
    "qwen3_5_text": _gated_delta_sizes,
    "qwen3_5_moe_text": _gated_delta_sizes,
}
