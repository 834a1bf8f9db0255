"""KDA over packed tokens in three stages, forward and backward.

What happens inside chunks is flash-linear-attention's (fla-core 0.6), one launch over all sequences; the recurrence
over chunks is ours and walks the tree. The backward computes w, u, the states and v_new again, as upstream does,
unless the forward is told to keep them.
"""

import torch
from fla.ops.gla.chunk import chunk_gla_fwd_o_gk
from fla.ops.kda.chunk_bwd import chunk_kda_bwd_dAv, chunk_kda_bwd_wy_dqkg_fused
from fla.ops.kda.chunk_intra import chunk_kda_bwd_intra, chunk_kda_fwd_intra
from fla.ops.kda.wy_fast import recompute_w_u_fwd
from fla.ops.utils import chunk_local_cumsum
from fla.ops.utils.constant import RCP_LN2

from .sequence_layout import SequenceLayout
from .state_recurrence_triton import run_state_gradients, run_states


def forward(
    q: torch.Tensor,  # [1, T, Hk, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [1, T, H, V]
    g: torch.Tensor,  # [1, T, H, K]
    beta: torch.Tensor,  # [1, T, H]
    slots: torch.Tensor,
    layout: SequenceLayout,
    *,
    scale: float,
    safe_gate: bool,
    has_initial_states: bool,
    keep_intermediates: bool,
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Outputs `[1, T, H, V]`, and what `backward` needs beside q, k, v, beta and the slots. Fills `slots`."""
    tables = _tables(layout)
    decay = chunk_local_cumsum(g, scale=RCP_LN2, **tables)
    w, u, q_decayed, k_to_end, scores_qk, inverse = chunk_kda_fwd_intra(
        q=q,
        k=k,
        v=v,
        gk=decay,
        beta=beta,
        scale=scale,
        safe_gate=safe_gate,
        disable_recompute=keep_intermediates,  # makes q_decayed
        **tables,
    )
    h, v_new = run_states(
        k_to_end[0], w[0], u[0], decay[0], slots, layout, has_initial_states=has_initial_states, slots_are_known=False
    )
    output = chunk_gla_fwd_o_gk(q=q, v=v_new[None], g=decay, A=scores_qk, h=h[None], scale=scale, **tables)
    kept = (w, q_decayed, k_to_end, h, v_new) if keep_intermediates else ()
    return output, (decay, scores_qk, inverse, *kept)


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
    safe_gate: bool,
    has_initial_states: bool,
) -> tuple[torch.Tensor, ...]:
    """Gradients of q and k `[1, T, H, K]`, v, g, beta, all per packed token, and of the roots' initial states."""
    tables = _tables(layout)
    decay, scores_qk, inverse, *kept = saved
    if kept:
        w, q_decayed, k_to_end, h, v_new = kept
    else:
        w, u, q_decayed, k_to_end = recompute_w_u_fwd(
            q=q,
            k=k,
            v=v,
            beta=beta,
            A=inverse,
            gk=decay,
            cu_seqlens=tables["cu_seqlens"],
            chunk_indices=tables["chunk_indices"],
        )
        h, v_new = run_states(
            k_to_end[0],
            w[0],
            u[0],
            decay[0],
            slots,
            layout,
            has_initial_states=has_initial_states,
            slots_are_known=True,
        )
        del u
    d_scores_qk, dv = chunk_kda_bwd_dAv(q=q, k=k, v=v_new[None], do=do, A=scores_qk, scale=scale, **tables)
    dh, d_roots = run_state_gradients(
        q_decayed[0],
        k_to_end[0],
        w[0],
        decay[0],
        do[0],
        dv[0],
        state_gradients,
        layout,
        scale=scale,
        has_initial_states=has_initial_states,
    )
    del w, q_decayed, k_to_end, kept, saved
    dq, dk, dv, dbeta, dg, d_inverse = chunk_kda_bwd_wy_dqkg_fused(
        q=q,
        k=k,
        v=v,
        v_new=v_new[None],
        g=decay,
        beta=beta,
        A=inverse,
        h=h[None],
        do=do,
        dh=dh[None],
        dv=dv,
        scale=scale,
        **tables,
    )
    del h, dh, v_new
    dq, dk, dbeta, dg = chunk_kda_bwd_intra(
        q=q,
        k=k,
        g=decay,
        beta=beta,
        dAqk=d_scores_qk,
        dAkk=d_inverse,
        dq=dq,
        dk=dk,
        db=dbeta,
        dg=dg,
        safe_gate=safe_gate,
        **tables,
    )
    dg = chunk_local_cumsum(dg, reverse=True, **tables)
    return dq, dk, dv, dg, dbeta, d_roots


def _tables(layout: SequenceLayout) -> dict:
    return {
        "cu_seqlens": layout.cu_seqlens,
        "chunk_indices": layout.chunk_indices,
        "chunk_size": layout.chunk_size,
    }
