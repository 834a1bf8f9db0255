"""Linear attention on a tree as a token recurrence: the specification of KDA and Gated DeltaNet.

Row by row, from the state of the parent row. Written for reading: it loops over rows and keeps every row's state, so
it serves small sizes alone.
"""

import torch


def run_recurrence(
    q: torch.Tensor,  # [C, H, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [C, H, V]
    g: torch.Tensor,  # [C, H, K], or [C, H, 1] for one decay per head
    beta: torch.Tensor,  # [C, H]
    initial_states: torch.Tensor | None,  # [num_roots, H, K, V]
    row_parents: tuple[int, ...],
    boundary_rows: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row r with parent p, in depth-first order:

        S' = exp(g_r) * S_p
        S_r = S' + k_r (beta_r (v_r - k_r^T S'))^T
        o_r = S_r^T q_r

    The state above root i is `initial_states[i]`, zero without them. Queries are scaled and normalised already.
    Differentiable.

    Returns:
        `[C, H, V]`, and the states after `boundary_rows` `[M, H, K, V]`, in the inputs' dtype.
    """
    roots = iter(()) if initial_states is None else iter(initial_states)
    zero_state = k.new_zeros(*k.shape[1:], v.shape[-1])
    states: list[torch.Tensor] = []
    outputs = []
    for row, parent in enumerate(row_parents):
        state = next(roots, zero_state) if parent < 0 else states[parent]  # [H, K, V]
        state = state * g[row].exp()[..., None]
        recalled = (k[row][..., None] * state).sum(-2)  # [H, V]
        correction = beta[row][..., None] * (v[row] - recalled)
        state = state + k[row][..., None] * correction[..., None, :]
        states.append(state)
        outputs.append((q[row][..., None] * state).sum(-2))
    boundary_states = [states[row] for row in boundary_rows]
    return torch.stack(outputs), torch.stack(boundary_states) if boundary_states else zero_state[None][:0]
