"""The gradients of Gated DeltaNet's chunks with respect to q, k, w and the decay, in Triton.

The stage that flash-linear-attention calls `chunk_bwd_dqkwg`: everything is inside a chunk, given the state that the
chunk starts from and the gradient of the state that it ends with.
"""

import torch
import triton
import triton.language as tl

from .sequence_layout import SequenceLayout


def run_chunk_gradients(
    q: torch.Tensor,  # [T, Hk, K]
    k: torch.Tensor,
    v_new: torch.Tensor,  # [T, H, V]
    decay: torch.Tensor,  # [T, H], fp32, cumulative log2 decay within the chunk
    h: torch.Tensor,  # [num_chunks, H, K, V], initial states
    do: torch.Tensor,  # [T, H, V]
    dh: torch.Tensor,  # [num_chunks, H, K, V], gradients of the end states
    dv: torch.Tensor,  # [T, H, V], gradient of v_new
    layout: SequenceLayout,
    *,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """With G the decay, i >= j in a chunk, S its initial state and E the gradient of its end state:

        o_i = scale (exp2(G_i) S^T q_i + sum_j exp2(G_i - G_j) (q_i . k_j) v_j)
        end state = exp2(G_end) S + sum_j exp2(G_end - G_j) k_j v_j^T,  v_j = u_j - S^T w_j

    Returns:
        Gradients of q and k `[T, H, K]` in fp32, w `[T, H, K]` in the inputs' dtype, and the natural-log decay at each
        token `[T, H]` in fp32, before the reverse sum over the chunk.
    """
    num_tokens, num_heads, dim_v = v_new.shape
    dim_k = k.shape[2]
    dq = torch.empty(num_tokens, num_heads, dim_k, dtype=torch.float32, device=q.device)
    dk = torch.empty_like(dq)
    dw = torch.empty_like(dq, dtype=q.dtype)
    dg = torch.empty_like(decay, dtype=torch.float32)
    block_k = min(64, max(16, triton.next_power_of_2(dim_k)))
    block_v = min(64, max(16, triton.next_power_of_2(dim_v)))
    _gradient_kernel[(layout.num_chunks, num_heads)](
        q,
        k,
        v_new,
        decay,
        h,
        do,
        dh,
        dv,
        dq,
        dk,
        dw,
        dg,
        layout.cu_seqlens,
        layout.chunk_indices,
        scale,
        HK=k.shape[1],
        H=num_heads,
        K=dim_k,
        V=dim_v,
        BT=layout.chunk_size,
        BK=block_k,
        BV=block_v,
        PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=1,
    )
    return dq, dk, dw, dg


@triton.jit
def _gradient_kernel(
    q,
    k,
    v,
    decay,
    h,
    do,
    dh,
    dv,
    dq,
    dk,
    dw,
    dg,
    cu_seqlens,
    chunk_indices,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (chunks, heads): a program owns one chunk of one value head. Tokens past the sequence's end are masked."""
    chunk, i_h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_hk = i_h // (H // HK)
    sequence = tl.load(chunk_indices + 2 * chunk)
    begin = tl.load(cu_seqlens + sequence) + tl.load(chunk_indices + 2 * chunk + 1) * BT
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1), begin + BT)
    t = begin + tl.arange(0, BT)
    m_t = t < end
    o_k, o_v = tl.arange(0, BK), tl.arange(0, BV)

    g = tl.load(decay + t * H + i_h, mask=m_t, other=0.0)
    g_last = tl.load(decay + (end - 1) * H + i_h)
    to_end = tl.where(m_t, tl.exp2(g_last - g), 0.0)

    d_scores = tl.zeros([BT, BT], dtype=tl.float32)
    for i_v in range(0, V, BV):
        m_tv = m_t[:, None] & (i_v + o_v < V)[None, :]
        o_tv = (t[:, None] * H + i_h) * V + i_v + o_v[None, :]
        b_do = tl.load(do + o_tv, mask=m_tv, other=0.0)
        b_v = tl.load(v + o_tv, mask=m_tv, other=0.0)
        d_scores = tl.dot(b_do, tl.trans(b_v), d_scores, input_precision=PRECISION)
    at_or_below = (t[:, None] >= t[None, :]) & m_t[:, None] & m_t[None, :]
    difference = tl.where(at_or_below, g[:, None] - g[None, :], 0.0)
    d_scores = tl.where(at_or_below, d_scores * tl.exp2(difference) * scale, 0.0).to(k.dtype.element_ty)

    d_decay = tl.zeros([BT], dtype=tl.float32)
    d_last = tl.zeros([BK], dtype=tl.float32)
    for i_k in range(0, K, BK):
        m_k = i_k + o_k < K
        m_tk = m_t[:, None] & m_k[None, :]
        b_dq = tl.zeros([BT, BK], dtype=tl.float32)
        b_dk = tl.zeros([BT, BK], dtype=tl.float32)
        b_dw = tl.zeros([BT, BK], dtype=tl.float32)
        state_part = tl.zeros([BK], dtype=tl.float32)
        for i_v in range(0, V, BV):
            m_v = i_v + o_v < V
            m_tv = m_t[:, None] & m_v[None, :]
            m_kv = m_k[:, None] & m_v[None, :]
            o_tv = (t[:, None] * H + i_h) * V + i_v + o_v[None, :]
            o_kv = (chunk * H + i_h) * K * V + (i_k + o_k)[:, None] * V + i_v + o_v[None, :]
            b_h = tl.load(h + o_kv, mask=m_kv, other=0.0)
            b_dh = tl.load(dh + o_kv, mask=m_kv, other=0.0)
            b_do = tl.load(do + o_tv, mask=m_tv, other=0.0)
            b_v = tl.load(v + o_tv, mask=m_tv, other=0.0)
            b_dv = tl.load(dv + o_tv, mask=m_tv, other=0.0)
            state_part += tl.sum(b_h.to(tl.float32) * b_dh.to(tl.float32), axis=1)
            b_dq = tl.dot(b_do, tl.trans(b_h), b_dq, input_precision=PRECISION)
            b_dk = tl.dot(b_v, tl.trans(b_dh), b_dk, input_precision=PRECISION)
            b_dw = tl.dot(b_dv, tl.trans(b_h), b_dw, input_precision=PRECISION)
        o_tk = (t[:, None] * H + i_h) * K + i_k + o_k[None, :]
        o_tk_shared = (t[:, None] * HK + i_hk) * K + i_k + o_k[None, :]
        tl.store(dw + o_tk, (-b_dw).to(dw.dtype.element_ty), mask=m_tk)
        b_q = tl.load(q + o_tk_shared, mask=m_tk, other=0.0)
        b_k = tl.load(k + o_tk_shared, mask=m_tk, other=0.0)
        b_dq *= tl.exp2(g)[:, None] * scale
        b_dk *= to_end[:, None]
        d_last += state_part * tl.exp2(g_last) + tl.sum(b_dk * b_k.to(tl.float32), axis=0)
        b_dq = tl.dot(d_scores, b_k, b_dq, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(d_scores), b_q, b_dk, input_precision=PRECISION)
        d_decay += tl.sum(b_dq * b_q.to(tl.float32) - b_dk * b_k.to(tl.float32), axis=1)
        tl.store(dq + o_tk, b_dq, mask=m_tk)
        tl.store(dk + o_tk, b_dk, mask=m_tk)
    d_decay += tl.where(t == end - 1, tl.sum(d_last), 0.0)
    tl.store(dg + t * H + i_h, d_decay, mask=m_t)
