"""Gated DeltaNet over packed tokens in three stages, forward and backward.

As `kda_stages.py`, with one gradient stage of our own: flash-linear-attention 0.6 refuses its `chunk_bwd_dqkwg` on
Hopper with Triton 3.4 to 3.7.0, which miscompile it (its issue 640).
"""

import torch
from fla.ops.common.chunk_o import chunk_bwd_dv_local, chunk_fwd_o
from fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from fla.ops.gated_delta_rule.wy_fast import prepare_wy_repr_bwd, recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from .gated_delta_rule_triton import run_chunk_gradients
from .sequence_layout import SequenceLayout
from .state_recurrence_triton import run_state_gradients, run_states


def forward(
    q: torch.Tensor,  # [1, T, Hk, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [1, T, H, V]
    g: torch.Tensor,  # [1, T, H]
    beta: torch.Tensor,  # [1, T, H]
    slots: torch.Tensor,
    layout: SequenceLayout,
    *,
    scale: float,
    has_initial_states: bool,
    keep_intermediates: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Outputs `[1, T, H, V]`, and what `backward` needs beside q, k, v, beta and the slots. Fills `slots`."""
    sequences = {"cu_seqlens": layout.cu_seqlens, "chunk_indices": layout.chunk_indices}
    size = layout.chunk_size
    decay = chunk_local_cumsum(g, chunk_size=size, scale=RCP_LN2, **sequences)
    w, u, inverse = chunk_gated_delta_rule_fwd_intra(k=k, v=v, g=decay, beta=beta, chunk_size=size, **sequences)
    h, v_new = run_states(
        k[0], w[0], u[0], decay[0], slots, layout, has_initial_states=has_initial_states, slots_are_known=False
    )
    output = chunk_fwd_o(q=q, k=k, v=v_new[None], h=h[None], g=decay, scale=scale, chunk_size=size, **sequences)
    kept = (w, h, v_new) if keep_intermediates else ()
    return output, (decay, inverse, *kept)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    beta: torch.Tensor,
    saved: tuple[torch.Tensor, ...],
    slots: torch.Tensor,
    do: torch.Tensor,  # [1, T, H, V], zero where tokens are replayed
    state_gradients: torch.Tensor | None,
    layout: SequenceLayout,
    *,
    scale: float,
    has_initial_states: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q `[1, T, H, K]`, k, v, g, beta, all per packed token, and of the roots' initial states.

    The gradient of k comes per value head, as that of q.
    """
    sequences = {"cu_seqlens": layout.cu_seqlens, "chunk_indices": layout.chunk_indices}
    size = layout.chunk_size
    decay, inverse, *kept = saved
    if kept:
        w, h, v_new = kept
    else:
        w, u = recompute_w_u_fwd(k=k, v=v, beta=beta, A=inverse, g=decay, **sequences)
        h, v_new = run_states(
            k[0], w[0], u[0], decay[0], slots, layout, has_initial_states=has_initial_states, slots_are_known=True
        )
        del u
    dv = chunk_bwd_dv_local(q=q, k=k, g=decay, do=do, scale=scale, chunk_size=size, **sequences)
    dh, d_roots = run_state_gradients(
        q[0],
        k[0],
        w[0],
        decay[0],
        do[0],
        dv[0],
        state_gradients,
        layout,
        scale=scale,
        has_initial_states=has_initial_states,
    )
    dq, dk, dw, dg = run_chunk_gradients(q[0], k[0], v_new, decay[0], h, do[0], dh, dv[0], layout, scale=scale)
    del h, dh, v_new, w, kept, saved
    dk_wy, dv, dbeta, dg_wy = prepare_wy_repr_bwd(
        k=k, v=v, beta=beta, g=decay, A=inverse, dw=dw[None], du=dv, **sequences
    )
    dg = chunk_local_cumsum(dg[None] + dg_wy, chunk_size=size, reverse=True, **sequences)
    group = v.shape[2] // k.shape[2]
    dq, dk = (x[None].unflatten(2, (k.shape[2], group)).sum(3) for x in (dq, dk))
    return dq, dk + dk_wy, dv, dg, dbeta, d_roots
