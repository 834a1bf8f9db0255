"""The linear-attention seam: a modeling module's conv and chunk functions, wrapped once.

Layers call these functions by their module-level name, with the keyword arguments of the model's forward. With a
compact batch among them, the tree kernels run; without one, the original runs with its arguments untouched.
"""

import functools
import importlib
from types import ModuleType

import torch

from harts_hf.batch import CompactBatch
from harts_hf.kernels.linear_attention import tree_gated_delta_rule, tree_kda
from harts_hf.kernels.tree_conv import tree_causal_conv

from .families import CONV_FUNCTION, Family

CHUNK_SIZE = 64  # of flash-linear-attention's kernels and of Transformers' torch functions
TREE_FUNCTIONS = {"kda": tree_kda, "gated_delta_rule": tree_gated_delta_rule}


def install_linear_attention_seam(family: Family) -> None:
    """Wrap the conv and chunk functions of the family's modeling module; does nothing where that is done already."""
    if family.linear_attention is None or family.chunk_function is None:  # a softmax model
        return
    module = importlib.import_module(family.modeling_module)
    _wrap(module, CONV_FUNCTION, conv_seam)
    _wrap(module, family.chunk_function, functools.partial(chunk_seam, kind=family.linear_attention))


class _Seam:
    """A module-level function with a tree version beside it. A class so that it pickles and is recognised."""

    def __init__(self, original, tree_version):
        functools.update_wrapper(self, original)
        self.original = original
        self.tree_version = tree_version

    def __call__(self, *args, harts_batch: CompactBatch | None = None, **kwargs):
        if harts_batch is None:
            return self.original(*args, **kwargs)
        return self.tree_version(*args, harts_batch=harts_batch, **kwargs)


def _wrap(module: ModuleType, name: str, tree_version) -> None:
    function = getattr(module, name)
    if not isinstance(function, _Seam):
        setattr(module, name, _Seam(function, tree_version))


def conv_seam(
    hidden_states: torch.Tensor,  # [1, D, C]
    weight: torch.Tensor,  # [D, W]
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    harts_batch: CompactBatch,
    harts_layer: int,
    **kwargs,  # the model's own keyword arguments: masks and positions that a conv over rows has no use for
) -> torch.Tensor:
    width = weight.shape[-1]
    inputs = hidden_states.squeeze(0).transpose(0, 1)  # an index would give gradients a copy, channels first
    num_rows = len(inputs)
    if harts_batch.produces is not None:
        harts_batch.produces.put(harts_layer, "conv_input", inputs[max(0, num_rows - (width - 1)) :])
    if harts_batch.starts_from is not None:
        given = min(width - 1, harts_batch.num_prefix_rows)
        inputs = harts_batch.starts_from.before(inputs, harts_layer, "conv_input", rows=given)
    outputs = tree_causal_conv(inputs, weight, bias, harts_batch.conv_layout(width), activation=activation)
    return outputs[len(inputs) - num_rows :].transpose(0, 1)[None]


def chunk_seam(
    query: torch.Tensor,  # [1, C, Hk, K]
    key: torch.Tensor,
    value: torch.Tensor,  # [1, C, H, V]
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    kind: str,
    harts_batch: CompactBatch,
    harts_safe_gate: bool,
    harts_recomputes: bool,
    harts_layer: int,
    harts_linear_attention: str | None = None,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    if initial_state is not None or output_final_state:
        raise ValueError("a tree forward has no cache: call the model with use_cache=False")
    query, key, value, g, beta = (x.squeeze(0) for x in (query, key, value, g, beta))
    queries, inputs = query, {"key": key, "value": value, "g": g, "beta": beta}
    source, sink = harts_batch.starts_from, harts_batch.produces
    replayed = harts_batch.replayed_prefix_rows(CHUNK_SIZE)
    boundary_rows = []
    if sink is not None:
        last_boundary = sink.tokens - sink.tokens % CHUNK_SIZE
        for name, rows in inputs.items():  # those that a consumer replays
            sink.put(harts_layer, name, rows[max(0, last_boundary - sink.start) :])
        if last_boundary > sink.start:
            boundary_rows.append(last_boundary - 1 - sink.start + replayed)
    if source is not None and replayed:
        inputs = {name: source.before(rows, harts_layer, name, rows=replayed) for name, rows in inputs.items()}
        queries = torch.cat([queries.new_zeros(replayed, *queries.shape[1:]), queries])  # a replayed row asks nothing
    layout = harts_batch.chunk_layout(CHUNK_SIZE, boundary_rows)
    state = None if source is None else source.nearest(harts_layer, "state")  # [1, H, K, V]; None inside of chunk 0
    if state is not None:
        continued = harts_batch.continued_roots(CHUNK_SIZE)
        zeros = state.new_zeros(layout.num_roots - continued, *state.shape[1:])
        state = torch.cat([state.expand(continued, -1, -1, -1), zeros])
    # Tensor cores would round an fp32 model's decayed products to TF32, which the stock kernel does not.
    options = {"safe_gate": harts_safe_gate and query.dtype != torch.float32} if kind == "kda" else {}
    output, states = TREE_FUNCTIONS[kind](
        queries,
        *inputs.values(),
        layout,
        use_qk_l2norm=use_qk_l2norm_in_kernel,
        initial_states=state,
        implementation=harts_linear_attention,
        keep_intermediates=harts_recomputes,  # they live from the layer's recomputation to its backward
        **options,
    )
    if sink is not None and boundary_rows:
        sink.put(harts_layer, "state", states)
    return output[None, replayed:], None
