"""Linear attention on a tree on the GPU: all sequences of all rounds in one launch per stage.

Rows are gathered into packed sequences, replayed rows included; flash-linear-attention's kernels run inside chunks for
all of them at once, and our recurrence walks the tree between them (`kda_stages.py`, `gated_delta_rule_stages.py`).
Gradients of replayed rows add, in fp32 and in a fixed order, to those of the rows they replay.
"""

from types import ModuleType

import torch
from torch.autograd.function import once_differentiable

from . import gated_delta_rule_stages, kda_stages
from .gather_rows_triton import gather, sum_rows
from .normalized_rows_triton import gather_normalized, sum_normalized_gradients
from .row_sums import RowSums
from .sequence_layout import SequenceLayout


def run_tree(
    q: torch.Tensor,  # [C, Hk, K]
    k: torch.Tensor,
    v: torch.Tensor,  # [C, H, V]
    g: torch.Tensor,  # [C, H, K] or [C, H]
    beta: torch.Tensor,  # [C, H]
    initial_states: torch.Tensor | None,  # [num_roots, H, K, V], fp32
    layout: SequenceLayout,
    *,
    scale: float,
    use_qk_l2norm: bool,
    safe_gate: bool,
    keep_intermediates: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs `[C, H, V]` in `q`'s dtype, and the requested states `[M, H, K, V]` in fp32."""
    stages = kda_stages if g.dim() == 3 else gated_delta_rule_stages
    options = {"scale": scale, "has_initial_states": initial_states is not None}
    if stages is kda_stages:
        options["safe_gate"] = safe_gate
    with torch.cuda.device(q.device):
        return _TreeLinearAttention.apply(
            q, k, v, g, beta, initial_states, layout, stages, use_qk_l2norm, keep_intermediates, options
        )


class _TreeLinearAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, q, k, v, g, beta, initial_states, layout: SequenceLayout, stages: ModuleType, use_l2norm, keep, options
    ):
        q_rstd = k_rstd = None
        dtypes = [x.dtype for x in (v, g, beta)]
        if use_l2norm:
            (q, q_rstd), (k, k_rstd) = (gather_normalized(x, layout.rows) for x in (q, k))
        else:
            q, k = (gather(x, layout.rows) for x in (q, k))
        v, g, beta = (gather(x, layout.rows)[None] for x in (v, g, beta))
        q, k = q[None], k[None]
        first_slot = 0 if options["has_initial_states"] else layout.num_roots
        slots = torch.empty(
            layout.num_slots - first_slot,
            *v.shape[2:3],
            k.shape[-1],
            v.shape[-1],
            dtype=torch.float32,
            device=v.device,
        )
        if initial_states is not None:
            slots[: layout.num_roots] = initial_states
        output, saved = stages.forward(q, k, v, g, beta, slots, layout, keep_intermediates=keep, **options)
        ctx.save_for_backward(q, k, v, beta, q_rstd, k_rstd, slots, *saved)
        ctx.layout, ctx.stages, ctx.options, ctx.dtypes = layout, stages, options, dtypes
        return gather(output[0], layout.output_positions), slots[layout.requested_slots - first_slot]

    @staticmethod
    @once_differentiable
    def backward(ctx, d_output, d_states):
        q, k, v, beta, q_rstd, k_rstd, slots, *saved = ctx.saved_tensors
        layout = ctx.layout
        with torch.cuda.device(q.device):
            do = gather(d_output, layout.owned_rows)[None]
            d_states = d_states.contiguous() if len(layout.requested_slots) else None
            saved = tuple(saved)
            dq, dk, dv, dg, dbeta, d_roots = ctx.stages.backward(
                q, k, v, beta, saved, slots, do, d_states, layout, **ctx.options
            )
            # A replayed token has no output, so its query has no gradient.
            dq = _sum_heads(dq[0], q[0], q_rstd, layout, layout.owned_sums)
            dk = _sum_heads(dk[0], k[0], k_rstd, layout, layout.sums)
            dv, dg, dbeta = (
                sum_rows(x[0], layout.sums, dtype) for x, dtype in zip((dv, dg, dbeta), ctx.dtypes, strict=True)
            )
        d_roots = d_roots if ctx.options["has_initial_states"] else None
        return dq, dk, dv, dg, dbeta, d_roots, *(None,) * 5


def _sum_heads(
    gradient: torch.Tensor,
    heads: torch.Tensor,
    rstd: torch.Tensor | None,
    layout: SequenceLayout,
    sums: RowSums,
) -> torch.Tensor:
    """Gradients `[T, H, K]` of queries or keys per packed token and value head -> `[C, Hk, K]` per row.

    Args:
        gradient: with respect to what the kernels read.
        heads: `[T, Hk, K]`, what they read; rstd: `[T, Hk]`, its reciprocal norms, or None if it was not normalised.
        layout, sums: packed tokens of each row whose gradients count.
    """
    if rstd is not None:
        return sum_normalized_gradients(gradient, heads, rstd, layout.output_positions, sums)
    group = gradient.shape[1] // heads.shape[1]
    if group == 1:
        return sum_rows(gradient, sums, heads.dtype)
    return sum_rows(gradient, sums, torch.float32).unflatten(1, (-1, group)).sum(2).to(heads.dtype)
