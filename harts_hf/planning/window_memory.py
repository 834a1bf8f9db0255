"""WindowMemory: bytes that a sharing window keeps alive, from a model's config.

While a window's consumers run, its boundary waits as leaves with fp32 gradients, and the producer keeps what its
backward starts from. Per prefix row: K and V of each softmax layer, those of MLA after their expansion to heads, since
that is where attention is entered; log-prob and entropy of the token; the residual stream at each layer's checkpoint
and behind the last layer; the row that the head reads; the rotary cosines and sines; the batch's index tables. Per
window: each linear layer's fp32 state at the boundary, the rows that a consumer replays and the last conv inputs. What
is handed over has gradients, the rest has none. Consumers run one after another, so a replica has one window alive at
a time, and those around it.

Counted from above: each token of a prefix as if it were scored, a consumer as if it replayed the most rows. Not
counted: a dense attention mask (on the CPU; on CUDA up to 1024 rows, or for heads narrower than 16 channels), and the
router logits that an auxiliary loss asks for.
"""

from dataclasses import dataclass

FP32_BYTES = 4
INDEX_BYTES = 8
# Indices of a row, two fp32 or int32 as one: tokens, positions, counts, scores and their rows, visibility. Beside
# those of its convolutions, a row of linear attention has its places in chunks and sequences, and their inverse.
ROW_INDICES, LINEAR_ROW_INDICES = 8, 4
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
            dtype_bytes: bytes of an activation: of a parameter, since under autocast the residual stream has the
                parameters' dtype.
            checkpoints: what a producer that is run with activation recomputation keeps for its backward stays on the
                device. False where it is offloaded. A producer without recomputation keeps all its activations, which
                no config tells: use `WindowMemory` with measured bytes.

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
        row_bytes += ROW_INDICES * INDEX_BYTES + 2 * _rotary_width(config) * dtype_bytes
        if checkpoints:  # the layers' inputs, the last one's output, what the head reads; the softmax's denominator
            row_bytes += (config.num_hidden_layers + 2) * config.hidden_size * dtype_bytes + FP32_BYTES
        boundary_bytes = config.hidden_size * handed_over
        if linear_layers:
            state, conv_channels, row = LINEAR_SIZES[config.model_type](config)
            row_bytes += (config.linear_conv_kernel_dim + LINEAR_ROW_INDICES) * INDEX_BYTES
            conv_inputs = (config.linear_conv_kernel_dim - 1) * conv_channels
            per_layer = 2 * state * FP32_BYTES + (conv_inputs + (CHUNK_SIZE - 1) * row) * handed_over
            boundary_bytes += linear_layers * per_layer
        return cls(max_bytes=max_bytes, row_bytes=row_bytes, boundary_bytes=boundary_bytes)


def _latent_heads(config) -> int:
    key_dim = config.qk_nope_head_dim + config.qk_rope_head_dim
    return config.num_attention_heads * (key_dim + config.v_head_dim)


def _keys_and_values(config) -> int:
    return 2 * config.num_key_value_heads * _head_dim(config)


def _head_dim(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rotary_width(config) -> int:
    """Channels of the cosines that all layers share; the sines have as many."""
    if config.model_type == "kimi_linear":  # no positions
        return 0
    if config.model_type == "bailing_hybrid":
        return config.qk_rope_head_dim
    parameters = config.rope_parameters or {}
    return int(_head_dim(config) * parameters.get("partial_rotary_factor", 1.0))


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
