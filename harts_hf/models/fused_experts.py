"""An experts implementation for Transformers' MoE models: `experts_implementation="harts"`.

The grouped matrix products are those of Transformers' "grouped_mm"; around them there are three passes over the rows
forward, and as many backward (`kernels/expert_rows.py`). It serves ordinary calls as well as tree
forwards: `from_pretrained(..., experts_implementation="harts")`, or `model.set_experts_implementation("harts")`. The
name is known once this module is imported, which `enable_tree_forward` and the trainer do.
"""

import torch
from transformers.activations import SiLUActivation
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate, _grouped_linear

from harts_hf.kernels.expert_rows import add_choices, spread_rows, weighted_swiglu

from .families import UnsupportedModelError

NAME = "harts"


def fused_experts_forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Experts of SwiGLU without biases, as Transformers' experts implementations are called.

    Args:
        self: a module decorated with `use_experts_implementation`: `gate_up_proj` `[E, 2 I, D]`, `down_proj`
            `[E, D, I]`, or both transposed with `is_transposed`.
        hidden_states: `[C, D]`, bf16, fp16 or fp32: torch's grouped products raise for fp64.
        top_k_index: `[C, k]`, int64, an expert of each choice.
        top_k_weights: `[C, k]`, their weights.

    Returns:
        `[C, D]` in `hidden_states`' dtype.

    Raises:
        UnsupportedModelError: experts with biases, another activation, norms behind them, or expert parallelism.
    """
    _refuse(self)
    num_tokens, k = top_k_index.shape
    sorted_experts, order = torch.sort(top_k_index.reshape(-1), stable=True)
    experts = torch.arange(self.num_experts, device=order.device)
    ends = torch.searchsorted(sorted_experts, experts, right=True).to(torch.int32)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=order.device)
    places = places.view(num_tokens, k)

    rows = spread_rows(hidden_states, order, places)
    weight_dtype = torch.promote_types(hidden_states.dtype, torch.float32)
    weights = top_k_weights.reshape(-1, 1).to(weight_dtype)
    weights = spread_rows(weights, order, places.view(-1, 1))[:, 0]  # a permutation
    hidden = _grouped_linear(rows, self.gate_up_proj, ends, is_transposed=self.is_transposed)
    hidden = weighted_swiglu(hidden, weights)
    hidden = _grouped_linear(hidden, self.down_proj, ends, is_transposed=self.is_transposed)
    return add_choices(hidden, order, places).to(hidden_states.dtype)


def _refuse(experts: torch.nn.Module) -> None:
    if experts._is_expert_parallel:
        raise UnsupportedModelError(f"experts_implementation={NAME!r} has no expert parallelism: use 'grouped_mm'")
    has_silu = isinstance(getattr(experts, "act_fn", None), (torch.nn.SiLU, SiLUActivation))
    plain = experts.has_gate and experts.is_concatenated and type(experts)._apply_gate is _default_apply_gate
    if not (has_silu and plain) or experts.has_bias or experts.has_post_expert_norm:
        raise UnsupportedModelError(
            f"experts_implementation={NAME!r} serves SwiGLU experts without biases and norms, and "
            f"{type(experts).__name__} is none: use 'grouped_mm'"
        )


ALL_EXPERTS_FUNCTIONS.register(NAME, fused_experts_forward)
