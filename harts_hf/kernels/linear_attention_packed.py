"""Linear attention on a tree by packed calls of flash-linear-attention's public functions.

Each call pays the whole kernel, so many calls cost time; in exchange only public functions run. States pass between
calls in fp32. With the calls of a round plan, the paper's own scheme, a trajectory's arithmetic is that of running it
alone; with one call per level of segments it is not, for chunks begin anew at every segment.
"""

from collections.abc import Callable
from typing import Literal

import torch

from .gather_rows import gather_rows
from .packed_calls import PackedCalls

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
            "flash-linear-attention's kernels cannot be imported: install "
            "fla-core >= 0.6, < 0.7 with Triton, or pass implementation='torch'"
        ) from error


def run_packed_calls(
    q: torch.Tensor,  # [C, Hk, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [C, H, V]
    g: torch.Tensor,  # [C, H, K] or [C, H]
    beta: torch.Tensor,  # [C, H]
    initial_states: torch.Tensor | None,  # [num_roots, H, K, V]
    calls: PackedCalls,
    *,
    scale: float,
    use_qk_l2norm: bool,
    packed: PackedFunction,
    **options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the calls in order and put their outputs in row order.

    Args:
        packed: runs one call, with the signature of `PackedFunction`.
        options: further keyword arguments of `packed`.

    Returns:
        `[C, H, V]` in `packed`'s output dtype, and the requested states `[M, H, K, V]`, fp32 at least.
    """
    state_dtype = torch.promote_types(q.dtype, torch.float32)
    lengths = [len(call.rows) for call in calls.calls]
    # One gather for all calls: the gradient of a row is then summed once, whatever the number of calls.
    rows = (gather_rows(x, calls.rows) for x in (q, k, v, g.to(state_dtype), beta))
    inputs = zip(*(x.split(lengths) for x in rows), strict=True)

    zero_state = torch.zeros(v.shape[1], q.shape[-1], v.shape[-1], dtype=state_dtype, device=v.device)  # [H, K, V]
    states: list[torch.Tensor] = []  # final state of each piece, by its number over all calls

    def state_of(source: int) -> torch.Tensor:
        if source >= 0:
            return states[source]
        return zero_state if initial_states is None else initial_states[-1 - source]

    outputs = []
    for call, hands_over, tensors in zip(calls.calls, calls.hands_over, inputs, strict=True):
        output, final_states = packed(
            *(x[None] for x in tensors),
            scale=scale,
            use_qk_l2norm_in_kernel=use_qk_l2norm,
            initial_state=torch.stack([state_of(source) for source in call.sources]),
            output_final_state=hands_over,
            cu_seqlens=call.cu_seqlens,
            cu_seqlens_cpu=call.cu_seqlens_cpu,
            **options,
        )
        outputs.append(output.squeeze(0))
        # Views of single pieces: autograd adds the gradients of several readers one by one, in a fixed order.
        states.extend(final_states.unbind(0) if hands_over else [zero_state] * len(call.sources))
    boundary_states = [states[piece] for piece in calls.boundary_pieces]
    return gather_rows(torch.cat(outputs), calls.output), (
        torch.stack(boundary_states) if boundary_states else zero_state[None][:0]
    )
