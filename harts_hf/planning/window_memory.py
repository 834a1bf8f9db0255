"""WindowMemory: bytes that a sharing window keeps alive, from a model's config.

While a window's consumers run, its boundary waits as leaves with fp32 gradients, and the producer keeps its
checkpoints for its backward. Per prefix row: K and V of each softmax layer, those of MLA after their expansion to
heads, since that is where attention is entered; the log-prob and entropy of the shared token; the residual stream at
each layer's checkpoint. Per window: each linear layer's fp32 state at the boundary, the rows that a consumer replays
and the last conv inputs. All but the checkpoints have gradients. Consumers run one after another, so a replica has one
window alive at a time, and those around it.
"""

from dataclasses import dataclass

FP32_BYTES = 4
CHUNK_SIZE = 64  # of the linear attention; a consumer replays fewer rows


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
            checkpoints: one hidden state per layer of a producer that is run with activation recomputation stays on
                the device. False where they are offloaded. A producer without recomputation keeps all its
                activations, which no config tells: use `WindowMemory` with measured bytes.

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
        handed_over = dtype_bytes + FP32_BYTES  # an element of a leaf and of its gradient
        row_bytes = softmax_layers * SOFTMAX_WIDTH[config.model_type](config) * handed_over + 2 * 2 * FP32_BYTES
        if checkpoints:
            row_bytes += config.num_hidden_layers * config.hidden_size * dtype_bytes
        boundary_bytes = config.hidden_size * handed_over
        if linear_layers:
            state, conv_channels, row = LINEAR_SIZES[config.model_type](config)
            conv_inputs = (config.linear_conv_kernel_dim - 1) * conv_channels
            per_layer = 2 * state * FP32_BYTES + (conv_inputs + (CHUNK_SIZE - 1) * row) * handed_over
            boundary_bytes += linear_layers * per_layer
        return cls(max_bytes=max_bytes, row_bytes=row_bytes, boundary_bytes=boundary_bytes)


def _latent_heads(config) -> int:
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return config.num_attention_heads * (key_dim + config.v_head_dim)


def _keys_and_values(config) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_key_value_heads * head_dim


def _kda_sizes(config) -> tuple[int, int, int]:
    width = config.linear_num_heads * config.linear_head_dim
    return width * config.linear_head_dim, 3 * width, 3 * width + config.linear_num_heads


def _gated_delta_sizes(config) -> tuple[int, int, int]:
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    return values * config.linear_key_head_dim, 2 * keys + values, keys + values + 2 * config.linear_num_value_heads


# Model type -> elements that a softmax layer keeps for each row.
SOFTMAX_WIDTH = {
    "bailing_hybrid": _latent_heads,
    "kimi_linear": _latent_heads,
    "qwen3_next": _keys_and_values,
    "qwen3_5_text": _keys_and_values,
    "qwen3_5_moe_text": _keys_and_values,
    "olmo_hybrid": _keys_and_values,
    "qwen3": _keys_and_values,
    "qwen3_moe": _keys_and_values,
    "llama": _keys_and_values,
}

# Model type -> elements of a linear layer's state, channels of its conv, elements of a row that is replayed.
LINEAR_SIZES = {
    "bailing_hybrid": _kda_sizes,
    "kimi_linear": _kda_sizes,
    "qwen3_next": _gated_delta_sizes,
    "qwen3_5_text": _gated_delta_sizes,
    "qwen3_5_moe_text": _gated_delta_sizes,
    "olmo_hybrid": _gated_delta_sizes,
}
