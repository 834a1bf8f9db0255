"""Linear attention on a tree by packed calls of flash-linear-attention's public functions: the paper's own scheme.

Sequences are cut where another starts from their state; a call runs all pieces whose initial states are known. Each
call pays the whole kernel, so many rounds cost time; in exchange only public functions run. States pass between calls
in fp32, so a trajectory's arithmetic is that of running it alone.
"""

from collections.abc import Callable
from typing import Literal

import torch

from .chunk_layout import ChunkLayout
from .gather_rows import gather_rows

# flash-linear-attention's signature for packed sequences: q, k `[1, T, Hk, K]`, v `[1, T, H, V]`, g `[1, T, H, K]` or
# `[1, T, H]`, beta `[1, T, H]`, initial states `[n, H, K, V]`; returns outputs `[1, T, H, V]`, final states or None.
PackedFunction = Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


def load_packed_function(kind: Literal["kda", "gated_delta_rule"]) -> PackedFunction:
    """flash-linear-attention's chunkwise kernel.

    Raises:
        ImportError: flash-linear-attention or Triton is not installed.
    """
    try:
        if kind == "kda":
            from fla.ops.kda import chunk_kda

            return chunk_kda
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return chunk_gated_delta_rule
    except ImportError as error:
        raise ImportError(
            "implementation 'rounds' runs flash-linear-attention's kernels, which cannot be imported: install "
            "fla-core >= 0.6, < 0.7 with Triton, or pass implementation='torch'"
        ) from error


def run_rounds(
    q: torch.Tensor,  # [C, Hk, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [C, H, V]
    g: torch.Tensor,  # [C, H, K] or [C, H]
    beta: torch.Tensor,  # [C, H]
    layout: ChunkLayout,
    *,
    scale: float,
    use_qk_l2norm: bool,
    packed: PackedFunction,
) -> torch.Tensor:
    """Run the packed calls of `layout` in order and put their outputs in row order.

    Args:
        packed: runs one call, with the signature of `PackedFunction`.

    Returns:
        `[C, H, V]` in `packed`'s output dtype.
    """
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = [len(call.rows) for call in layout.packed_calls]
    # One gather for all calls: the gradient of a row is then summed once, whatever the number of calls.
    rows = (gather_rows(x, layout.packed_rows) for x in (q, k, v, g.to(state_dtype), beta))
    inputs = zip(*(x.split(lengths) for x in rows), strict=True)

    zero_state = torch.zeros(v.shape[1], q.shape[-1], v.shape[-1], dtype=state_dtype, device=v.device)  # [H, K, V]
    states: list[torch.Tensor] = []  # final state of each piece, by its number over all calls
    outputs = []
    for call, hands_over, tensors in zip(layout.packed_calls, layout.packed_call_hands_over, inputs, strict=True):
        output, final_states = packed(
            *(x[None] for x in tensors),
            scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm,
            initial_state=torch.stack([zero_state if source < 0 else states[source] for source in call.sources]),
            output_final_state=hands_over,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_cpu=call.cu_seqlens_cpu,
        )
        outputs.append(output[0])
        # Views of single pieces: autograd adds the gradients of several readers one by one, in a fixed order.
        states.extend(final_states.unbind(0) if hands_over else [zero_state] * len(call.sources))
    return gather_rows(torch.cat(outputs), layout.packed_output)
