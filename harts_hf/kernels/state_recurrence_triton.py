"""The state recurrence of a delta rule over a tree of chunks, in Triton: the only stage that walks the tree.

One launch runs all sequences. A program owns one sequence, one value head and a block of value channels. Programs take
tickets, so they start in an order in which whatever a program waits for has started before it, whatever the order in
which the device schedules them; a program spins on the flag of the state that it starts from. States cross between
programs in fp32, so a trajectory's arithmetic is that of running it alone.

Backward, the gradient of a state is the sum over the sequences that start from it. These add to the accumulators of
their groups one after another, in a fixed order, and the sequence that the state belongs to adds the groups.
"""

import torch
import triton
import triton.language as tl

from .gather_rows_triton import sum_rows
from .sequence_layout import SequenceLayout


def run_states(
    k: torch.Tensor,
    w: torch.Tensor,
    u: torch.Tensor,
    decay: torch.Tensor,
    slots: torch.Tensor,
    layout: SequenceLayout,
    *,
    has_initial_states: bool,
    slots_are_known: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Initial states of all chunks, and the values that the chunks write.

    Per chunk with initial state S: v_new = u - w S; S' = decayed S + k^T v_new, where a per-channel decay is folded
    into k already and a per-head decay is applied to v_new here.

    Args:
        k: `[T, Hk, K]`, keys; with one decay per channel decayed to the chunk's end, one per value head.
        w: `[T, H, K]`; u: `[T, H, V]`, the WY form.
        decay: cumulative log2 decay within the chunk, fp32: `[T, H, K]`, or `[T, H]` for one per head.
        slots: `[num_slots, H, K, V]`, fp32, states at boundaries, the initial states of the roots first if there are
            any. Written, unless `slots_are_known`.
        layout: sequences of the tree.
        has_initial_states: whether `slots` begins with the roots' initial states.
        slots_are_known: recompute from the states in `slots`: nothing waits, pieces of a sequence run side by side.

    Returns:
        h `[num_chunks, H, K, V]` and v_new `[T, H, V]`, in the inputs' dtype.
    """
    num_heads, dim_k, dim_v = w.shape[1], w.shape[2], u.shape[2]
    units = layout.pieces if slots_are_known else layout.sequences
    h = k.new_empty(layout.num_chunks, num_heads, dim_k, dim_v)
    v_new = torch.empty_like(u)
    # The same for every tree, so that bits do not depend on it.
    constants = _constants(k, w, dim_v, decay, layout, block_v=32, num_warps=4, num_stages=2, num_key_tiles=2)
    programs = num_heads * triton.cdiv(dim_v, constants["BV"])  # of a unit
    flags = _flags(layout.num_slots, programs, k.device)
    _forward_kernel[(units.num_units * programs,)](
        k,
        w,
        u,
        decay,
        h,
        v_new,
        slots,
        flags,
        units.forward_order,
        units.tokens,
        units.first_chunk,
        units.source,
        units.piece_offsets,
        units.piece_chunks,
        units.piece_slots,
        0 if has_initial_states else layout.num_roots,
        layout.num_roots,
        IN_ORDER=not slots_are_known,
        **constants,
    )
    return h, v_new


def run_state_gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    w: torch.Tensor,
    decay: torch.Tensor,
    do: torch.Tensor,
    dv: torch.Tensor,
    state_gradients: torch.Tensor | None,
    layout: SequenceLayout,
    *,
    scale: float,
    has_initial_states: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the end states of all chunks, and of the values that the chunks write.

    Args:
        q: `[T, Hk, K]`, queries; with one decay per channel decayed from the chunk's start, one per value head.
        k, w, decay: as in `run_states`.
        do: `[T, H, V]`, gradient of the outputs.
        dv: `[T, H, V]`, gradient of v_new from the chunk's own outputs; the rest is added in place.
        state_gradients: `[M, H, K, V]`, fp32, of the states at `layout.requested_slots`, or None.
        layout: sequences of the tree.
        scale: of the queries.
        has_initial_states: whether gradients of the roots' initial states are wanted.

    Returns:
        dh `[num_chunks, H, K, V]` in the inputs' dtype, and `[num_roots, H, K, V]` in fp32: gradients of the initial
        states, empty without them. `dv` is completed in place.
    """
    num_heads, dim_k, dim_v = w.shape[1], w.shape[2], do.shape[2]
    units = layout.sequences
    dh = k.new_empty(layout.num_chunks, num_heads, dim_k, dim_v)
    # One long sequence is bound by the latency of its chunks, many short ones by memory.
    is_chain = 2 * layout.longest_tokens > len(layout.rows)
    constants = _constants(
        k,
        w,
        dim_v,
        decay,
        layout,
        block_v=32 if is_chain or dim_k > 128 else 64,
        num_warps=8,
        num_stages=3,
        num_key_tiles=3,
    )
    programs = num_heads * triton.cdiv(dim_v, constants["BV"])  # of a sequence
    first_group = 0 if has_initial_states else layout.num_root_groups
    groups = torch.empty(
        layout.num_groups - first_group, num_heads, dim_k, dim_v, dtype=torch.float32, device=k.device
    )
    flags = _flags(layout.num_groups, programs, k.device)
    _backward_kernel[(units.num_units * programs,)](
        q,
        k,
        w,
        decay,
        do,
        dv,
        dh,
        groups,
        groups if state_gradients is None else state_gradients,
        flags,
        layout.backward_order(_has_room_for_an_early_sequence(k.device, programs)),
        units.tokens,
        units.first_chunk,
        units.piece_offsets,
        units.piece_chunks,
        units.piece_slots,
        layout.group_offsets,
        layout.group_sizes,
        layout.group,
        layout.rank_in_group,
        layout.request,
        first_group,
        scale,
        HAS_REQUESTS=state_gradients is not None,
        **constants,
    )
    if not has_initial_states:
        return dh, groups[:0]
    return dh, sum_rows(groups, layout.root_sums, torch.float32)


def _constants(
    k: torch.Tensor,
    w: torch.Tensor,
    dim_v: int,
    decay: torch.Tensor,
    layout: SequenceLayout,
    *,
    block_v: int,
    num_warps: int,
    num_stages: int,
    num_key_tiles: int,
) -> dict:
    """Sizes and configuration of a kernel.

    Args:
        block_v, num_warps, num_stages: wanted for 16-bit operands, as tried on an H200 (no record is kept). Fewer
            value channels or stages where shared memory asks for it.
        num_key_tiles: tiles `[BT, BK]` that a chunk reads; it reads one `[BT, BV]` less.
    """
    block_k = max(16, triton.next_power_of_2(w.shape[2]))
    block_v = min(block_v, max(16, triton.next_power_of_2(dim_v)))
    if k.dtype == torch.float32:
        block_v, num_warps, num_stages = min(block_v, 16 if block_k > 64 else 32), 4, 1
    elif k.is_cuda:
        available = torch.cuda.get_device_properties(k.device).shared_memory_per_block_optin
        stage_bytes = 2 * layout.chunk_size * (num_key_tiles * block_k + (num_key_tiles - 1) * block_v)
        num_stages = max(1, min(num_stages, (available - 2 * block_k * block_v) // stage_bytes))
    return {
        "HK": k.shape[1],
        "H": w.shape[1],
        "K": w.shape[2],
        "V": dim_v,
        "BT": layout.chunk_size,
        "BK": block_k,
        "BV": block_v,
        "HEAD_DECAY": decay.dim() == 2,
        "PRECISION": "ieee" if k.dtype == torch.float32 else "tf32",  # of no effect on 16-bit operands
        "num_warps": num_warps,
        "num_stages": num_stages,
    }


def _flags(num_flags: int, programs: int, device: torch.device) -> torch.Tensor:
    """Ticket counter, then one flag per boundary (or group), head and block."""
    return torch.zeros(1 + num_flags * programs, dtype=torch.int32, device=device)


def _has_room_for_an_early_sequence(device: torch.device, programs: int) -> bool:
    """Whether one sequence may start before those that it waits for: the others need a multiprocessor to run on."""
    return device.type == "cuda" and programs < torch.cuda.get_device_properties(device).multi_processor_count


@triton.jit
def _wait(flag, value):
    while tl.atomic_add(flag, 0, sem="acquire") < value:
        pass


@triton.jit
def _forward_kernel(
    k,
    w,
    u,
    decay,
    h,
    v_new,
    slots,
    flags,
    order,
    tokens,
    first_chunk,
    source,
    piece_offsets,
    piece_chunks,
    piece_slots,
    first_slot,
    num_roots,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEAD_DECAY: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (units x heads x value blocks): a program owns the state `[K, BV]` of one unit and walks its chunks.

    Tokens past the unit's end and channels past K and V are masked. Waits at the unit's head, for its source.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    if IN_ORDER:
        ticket = tl.atomic_add(flags, 1, sem="relaxed")
    else:
        ticket = tl.program_id(0)
    head_block = ticket % (blocks * H)
    i_v = head_block % blocks
    i_h = head_block // blocks
    unit = tl.load(order + ticket // (blocks * H))
    begin, end = tl.load(tokens + 2 * unit), tl.load(tokens + 2 * unit + 1)
    chunk = tl.load(first_chunk + unit)

    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    o_kv = i_h * K * V + o_k[:, None] * V + o_v[None, :]

    state = tl.zeros([BK, BV], dtype=tl.float32)
    slot = tl.load(source + unit)
    if slot >= first_slot:
        if IN_ORDER:
            if slot >= num_roots:
                _wait(flags + 1 + slot * (blocks * H) + head_block, 1)
        p_slot = slots + (slot - first_slot) * (H * K * V) + o_kv
        state = tl.load(p_slot, mask=m_kv, other=0.0, cache_modifier=".cg")

    for piece in range(tl.load(piece_offsets + unit), tl.load(piece_offsets + unit + 1)):
        for _ in range(tl.load(piece_chunks + piece)):
            tl.store(h + chunk * (H * K * V) + o_kv, state.to(h.dtype.element_ty), mask=m_kv)
            t = begin + o_t
            m_t = t < end
            m_tk = m_t[:, None] & m_k[None, :]
            m_tv = m_t[:, None] & m_v[None, :]
            b_w = tl.load(w + (t[:, None] * H + i_h) * K + o_k[None, :], mask=m_tk, other=0.0)
            b_u = tl.load(u + (t[:, None] * H + i_h) * V + o_v[None, :], mask=m_tv, other=0.0)
            value = b_u - tl.dot(b_w, state.to(b_w.dtype), input_precision=PRECISION)
            tl.store(v_new + (t[:, None] * H + i_h) * V + o_v[None, :], value.to(v_new.dtype.element_ty), mask=m_tv)

            last = tl.minimum(begin + BT, end) - 1
            if HEAD_DECAY:
                g_last = tl.load(decay + last * H + i_h)
                g = tl.load(decay + t * H + i_h, mask=m_t, other=0.0)
                value = value * tl.where(m_t, tl.exp2(g_last - g), 0)[:, None]
                state *= tl.exp2(g_last)
            else:
                g_last = tl.load(decay + (last * H + i_h) * K + o_k, mask=m_k, other=0.0)
                state *= tl.exp2(g_last)[:, None]
            i_hk = i_h // (H // HK)
            b_k = tl.load(k + (t[None, :] * HK + i_hk) * K + o_k[:, None], mask=m_k[:, None] & m_t[None, :], other=0.0)
            state = tl.dot(b_k, value.to(b_k.dtype), state, input_precision=PRECISION)
            begin += BT
            chunk += 1
        if IN_ORDER:
            slot = tl.load(piece_slots + piece)
            if slot >= 0:
                p_slot = slots + (slot - first_slot) * (H * K * V) + o_kv
                tl.store(p_slot, state, mask=m_kv)
                tl.debug_barrier()  # all threads' stores come before the flag
                tl.atomic_xchg(flags + 1 + slot * (blocks * H) + head_block, 1, sem="release")


@triton.jit
def _backward_kernel(
    q,
    k,
    w,
    decay,
    do,
    dv,
    dh,
    groups,
    state_gradients,
    flags,
    order,
    tokens,
    first_chunk,
    piece_offsets,
    piece_chunks,
    piece_slots,
    group_offsets,
    group_sizes,
    group,
    rank_in_group,
    request,
    first_group,
    scale,
    HK: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BT: tl.constexpr,
    BK: tl.constexpr,
    BV: tl.constexpr,
    HEAD_DECAY: tl.constexpr,
    HAS_REQUESTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid (sequences x heads x value blocks): a program owns the gradient `[K, BV]` of the state and walks the
    sequence's chunks from the last one.

    Waits at each boundary for the groups of the sequences that start there, and at the head for its turn in its own
    group. Masks as in the forward kernel.
    """
    blocks: tl.constexpr = (V + BV - 1) // BV
    ticket = tl.atomic_add(flags, 1, sem="relaxed")
    head_block = ticket % (blocks * H)
    i_v = head_block % blocks
    i_h = head_block // blocks
    i_hk = i_h // (H // HK)
    unit = tl.load(order + ticket // (blocks * H))
    first, end = tl.load(tokens + 2 * unit), tl.load(tokens + 2 * unit + 1)
    num_chunks = (end - first + BT - 1) // BT
    begin = first + (num_chunks - 1) * BT
    chunk = tl.load(first_chunk + unit) + num_chunks - 1

    o_t, o_k, o_v = tl.arange(0, BT), tl.arange(0, BK), i_v * BV + tl.arange(0, BV)
    m_k, m_v = o_k < K, o_v < V
    m_kv = m_k[:, None] & m_v[None, :]
    o_kv = i_h * K * V + o_k[:, None] * V + o_v[None, :]

    d_state = tl.zeros([BK, BV], dtype=tl.float32)
    piece_begin = tl.load(piece_offsets + unit)
    num_pieces = tl.load(piece_offsets + unit + 1) - piece_begin
    for i in range(num_pieces):
        piece = piece_begin + num_pieces - 1 - i
        slot = tl.load(piece_slots + piece)
        if slot >= 0:
            if HAS_REQUESTS:
                wanted = tl.load(request + slot)
                if wanted >= 0:
                    d_state += tl.load(state_gradients + wanted * (H * K * V) + o_kv, mask=m_kv, other=0.0)
            for j in range(tl.load(group_offsets + slot), tl.load(group_offsets + slot + 1)):
                _wait(flags + 1 + j * (blocks * H) + head_block, tl.load(group_sizes + j))
                p_group = groups + (j - first_group) * (H * K * V) + o_kv
                d_state += tl.load(p_group, mask=m_kv, other=0.0, cache_modifier=".cg")
        for _ in range(tl.load(piece_chunks + piece)):
            tl.store(dh + chunk * (H * K * V) + o_kv, d_state.to(dh.dtype.element_ty), mask=m_kv)
            t = begin + o_t
            m_t = t < end
            m_tk = m_t[:, None] & m_k[None, :]
            m_tv = m_t[:, None] & m_v[None, :]
            m_kt = m_k[:, None] & m_t[None, :]
            last = tl.minimum(begin + BT, end) - 1
            b_k = tl.load(k + (t[:, None] * HK + i_hk) * K + o_k[None, :], mask=m_tk, other=0.0)
            d_value = tl.dot(b_k, d_state.to(b_k.dtype), input_precision=PRECISION)
            if HEAD_DECAY:
                g_last = tl.load(decay + last * H + i_h)
                g = tl.load(decay + t * H + i_h, mask=m_t, other=0.0)
                d_value *= tl.where(m_t, tl.exp2(g_last - g), 0)[:, None]
            p_dv = dv + (t[:, None] * H + i_h) * V + o_v[None, :]
            d_value += tl.load(p_dv, mask=m_tv, other=0.0)
            tl.store(p_dv, d_value.to(dv.dtype.element_ty), mask=m_tv)

            b_do = tl.load(do + (t[:, None] * H + i_h) * V + o_v[None, :], mask=m_tv, other=0.0)
            b_w = tl.load(w + (t[None, :] * H + i_h) * K + o_k[:, None], mask=m_kt, other=0.0)
            b_q = tl.load(q + (t[None, :] * HK + i_hk) * K + o_k[:, None], mask=m_kt, other=0.0)
            if HEAD_DECAY:
                b_q = (b_q * tl.exp2(g)[None, :]).to(b_w.dtype)
                d_state *= tl.exp2(g_last)
            else:
                g_last = tl.load(decay + (last * H + i_h) * K + o_k, mask=m_k, other=0.0)
                d_state *= tl.exp2(g_last)[:, None]
            d_state += tl.dot(b_q, b_do.to(b_q.dtype), input_precision=PRECISION) * scale
            d_state -= tl.dot(b_w, d_value.to(b_w.dtype), input_precision=PRECISION)
            begin -= BT
            chunk -= 1

    own = tl.load(group + unit)
    if own >= first_group:
        rank = tl.load(rank_in_group + unit)
        flag = flags + 1 + own * (blocks * H) + head_block
        p_group = groups + (own - first_group) * (H * K * V) + o_kv
        if rank > 0:
            _wait(flag, rank)
            d_state += tl.load(p_group, mask=m_kv, other=0.0, cache_modifier=".cg")
        tl.store(p_group, d_state, mask=m_kv)
        tl.debug_barrier()  # all threads' stores come before the flag
        tl.atomic_xchg(flag, rank + 1, sem="release")
