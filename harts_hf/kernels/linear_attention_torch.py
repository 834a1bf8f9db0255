"""Linear attention on a tree in plain torch, chunk by chunk: the CPU path, and the twin of the GPU kernels.

Three stages, of which only the second is sequential:

1. inside chunks, for all chunks of all sequences at once: decays, scores, and the triangular solve of the WY form;
2. the state recurrence, one step per level: the chunks of a level start from end states of the level before;
3. outputs, for all chunks at once.

So the number of rounds costs nothing. Within a chunk with initial state S and cumulative log decay G, the WY form is
u = T (beta v) and w = T (beta k exp(G)), with T the inverse of I + beta tril(k k^T exp(G_i - G_j), -1); the values
that the chunk writes are u - w S.
"""

import torch

from .chunk_layout import ChunkLayout
from .gather_rows import gather_rows


def run_chunks(
    q: torch.Tensor,  # [C, H, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [C, H, V]
    g: torch.Tensor,  # [C, H, K], or [C, H, 1] for one decay per head
    beta: torch.Tensor,  # [C, H]
    initial_states: torch.Tensor | None,  # [num_roots, H, K, V]
    layout: ChunkLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The recurrence of `linear_attention_reference.run_recurrence`, chunkwise.

    Queries are scaled and normalised already. Differentiable: gradients of replayed rows add to those of the rows they
    replay.

    Returns:
        `[C, H, V]`, and the requested states `[M, H, K, V]`, in the inputs' dtype.
    """
    slots = layout.rows.flatten()
    q, k, v, g, beta = (_to_chunks(x, slots, layout) for x in (q, k, v, g, beta[..., None]))  # [N, H, B, .]

    # Stage 1. A padding slot has beta = 0 and g = 0: it writes nothing to the state and does not decay it.
    g = g.cumsum(-2)
    scores_qk, scores_kk = _head_scores(q, k, g) if g.shape[-1] == 1 else _channel_scores(q, k, g)
    decay, end = g.exp(), g[..., -1:, :]
    right_sides = beta * torch.cat([v, k * decay], dim=-1)
    solved = torch.linalg.solve_triangular(beta * scores_kk, right_sides, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], dim=-1)

    # Stages 2 and 3
    k_to_end, end_decay = k * (end - g).exp(), end.exp().mT
    states, values = _recurrence(u, w, k_to_end, end_decay, initial_states, layout)
    output = (q * decay) @ states + scores_qk @ values  # [N, H, B, V]
    last = layout.boundary_chunks
    boundary_states = states[last] * end_decay[last] + k_to_end[last].mT @ values[last]
    return gather_rows(output.transpose(1, 2).flatten(0, 1), layout.output_slot), boundary_states


def _to_chunks(x: torch.Tensor, slots: torch.Tensor, layout: ChunkLayout) -> torch.Tensor:
    """Rows `[C, H, D]` -> chunks `[N, H, B, D]`, zero in padding slots."""
    chunks = gather_rows(x, slots).view(layout.num_chunks, layout.chunk_size, *x.shape[1:])
    return chunks.transpose(1, 2).contiguous()


def _head_scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed scores of the queries and of the keys against a chunk's keys, one decay per head.

    Args:
        q, k: `[N, H, B, K]`.
        g: `[N, H, B, 1]`, cumulative log decay.

    Returns:
        Two tensors `[N, H, B, B]`, for x = q and x = k: (x_i . k_j) exp(g_i - g_j) where i >= j, 0 above the diagonal.
    """
    # Masked before exp: above the diagonal it could overflow, and inf * 0 in the backward would be NaN.
    above_diagonal = torch.ones(g.shape[-2], g.shape[-2], dtype=torch.bool, device=g.device).triu(1)
    decay = (g - g.mT).masked_fill(above_diagonal, float("-inf")).exp()
    return (q @ k.mT) * decay, (k @ k.mT) * decay


def _channel_scores(q: torch.Tensor, k: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decayed scores with one decay per channel: sum over c of x_ic k_jc exp(g_ic - g_jc), for x = q and x = k.

    As one product of x exp(g) and k exp(-g) the second factor would overflow; formed directly, the decays would take
    [B, B, K]. Instead blocks of one row are merged in pairs until one block is left: the square below the diagonal,
    between the halves of a pair, is a product of x_i exp(g_i - m) and k_j exp(m - g_j) with m the decay at the end of
    the first half. As j <= end <= i, neither factor exceeds 1. Each of the log2(B) merges costs O(B K) exponentials:
    less, in time and in memory kept for the backward, than forming diagonal blocks of 4 rows or more directly.

    Args:
        q, k, g: `[N, H, B, K]`; B is a power of two.

    Returns:
        As `_head_scores`.
    """
    x = torch.stack([q, k])  # [2, N, H, B, K]
    scores = (x * k).sum(-1)[..., None, None]  # [2, N, H, blocks, size, size]
    size = 1
    while size < q.shape[-2]:
        (_, x_late), (k_early, _), (g_early, g_late) = (
            t.unflatten(-2, (-1, 2, size)).unbind(-3)  # two halves, each [.., blocks / 2, size, K]
            for t in (x, k, g)
        )
        middle = g_early[..., -1:, :]
        square = (x_late * (g_late - middle).exp()) @ (k_early * (middle - g_early).exp()).mT
        early, late = scores.unflatten(-3, (-1, 2)).unbind(-3)
        upper = torch.cat([early, torch.zeros_like(square)], dim=-1)
        scores = torch.cat([upper, torch.cat([square, late], dim=-1)], dim=-2)
        size *= 2
    scores_qk, scores_kk = scores.squeeze(-3).unbind(0)
    return scores_qk, scores_kk


def _recurrence(
    u: torch.Tensor,  # [N, H, B, V]
    w: torch.Tensor,  # [N, H, B, K]
    k_to_end: torch.Tensor,  # [N, H, B, K], keys decayed to the chunk's end
    end_decay: torch.Tensor,  # [N, H, K, 1], or [N, H, 1, 1]
    initial_states: torch.Tensor | None,  # [num_roots, H, K, V]
    layout: ChunkLayout,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Initial states `[N, H, K, V]` and values u - w S `[N, H, B, V]` of all chunks, level by level."""
    offsets = layout.level_offsets
    sizes = [end - begin for begin, end in zip(offsets, offsets[1:], strict=False)]
    levels = zip(*(x.split(sizes) for x in (u, w, k_to_end, end_decay, layout.parent)), strict=True)

    states, values = [], []
    end_states = u.new_zeros(0)
    for level, (u_l, w_l, k_l, decay_l, parent_l) in enumerate(levels):
        if level == 0 and initial_states is None:
            state = u.new_zeros(len(u_l), u.shape[1], w.shape[-1], u.shape[-1])
        elif level == 0:
            state = gather_rows(initial_states, layout.root)
        else:
            state = gather_rows(end_states, parent_l - offsets[level - 1])
        value = u_l - w_l @ state
        if level + 1 < len(sizes):
            end_states = state * decay_l + k_l.mT @ value
        states.append(state)
        values.append(value)
    return torch.cat(states), torch.cat(values)
