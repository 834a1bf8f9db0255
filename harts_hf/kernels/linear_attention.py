"""Linear attention on a prefix tree: KDA and Gated DeltaNet, each row computed once.

The state of a row is that of its parent, updated by the row's token, so a branch continues from its fork. Chunks are
counted from each trajectory's start, so a trajectory's arithmetic is that of running it alone. Implementations:

- "tree": all sequences of all rounds in one launch per stage; the default on CUDA, and only there.
- "torch": plain torch, chunk by chunk, all rounds at once; the default on the CPU, and the twin of "tree".
- "rounds": one packed call of flash-linear-attention per round, the paper's scheme; CUDA only.
- "nodewise": one packed call per level of segments, as in Tree Training; CUDA only. A comparator: chunks begin anew at
  each segment, so a trajectory's rounding is not that of running it alone.
- "reference": the token recurrence, the specification; slow.
"""

from typing import Literal, NamedTuple, get_args

import torch

from .chunk_layout import ChunkLayout
from .kda_gate import log_decay
from .linear_attention_packed import load_packed_function, run_packed_calls
from .linear_attention_reference import run_recurrence
from .linear_attention_torch import run_chunks

Implementation = Literal["tree", "torch", "rounds", "nodewise", "reference"]


class LinearAttentionOutput(NamedTuple):
    """Outputs `[C, H, V]` in `q`'s dtype, and the states `[M, H, K, V]` at the layout's requested boundaries, in fp32
    (fp64 for fp64 inputs)."""

    output: torch.Tensor
    states: torch.Tensor


def tree_kda(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: ChunkLayout,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_states: torch.Tensor | None = None,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    lower_bound: float | None = None,
    use_gate_in_kernel: bool = False,
    safe_gate: bool = False,
    keep_intermediates: bool = False,
    implementation: Implementation | None = None,
) -> LinearAttentionOutput:
    """Kimi Delta Attention over the rows of a prefix tree: a delta rule with one decay per key channel.

    For row r with parent p: S' = diag(exp(g_r)) S_p; S_r = S' + beta_r k_r (v_r - S'^T k_r)^T; o_r = scale S_r^T q_r,
    and S_p above a root is its initial state. The same as running `chunk_kda` on each trajectory and keeping each row
    once.

    Args:
        q, k: `[C, Hk, K]`, K at most 256 on CUDA. Hk divides H; each of their heads serves H / Hk consecutive value
            heads.
        v: `[C, H, V]`, of the same dtype: fp32, bf16, fp16, or fp64.
        g: `[C, H, K]`, log decay, natural log, <= 0; with `use_gate_in_kernel` the gate's input.
        beta: `[C, H]`, in 0 .. 1.
        layout: sequences of the tree, on the same device. "torch" needs a chunk size that is a power of two, "tree"
            and "rounds" one of 32 or 64, "nodewise" 64.
        scale: of the queries; defaults to K ** -0.5.
        use_qk_l2norm: divide each query and key head by sqrt(sum of squares + 1e-6) first.
        initial_states: `[num_roots, H, K, V]`, fp32: the states above the roots, in row order; zero if `None`.
        A_log, dt_bias, lower_bound, use_gate_in_kernel: as in `chunk_kda`. With `use_gate_in_kernel` the log decay is
            -exp(A_log) softplus(g + dt_bias), or lower_bound sigmoid(exp(A_log) (g + dt_bias)), computed once per row
            in fp32; `A_log` `[H]`, `dt_bias` `[H * K]`.
        safe_gate: a promise that every log decay lies in [-5, 0], which lets "tree" and "rounds" use tensor cores in
            the diagonal blocks. The others do not need it.
        keep_intermediates: keep what "tree" computes again in its backward: the same bits, faster, for the memory of
            the states of all chunks and some four inputs more. It costs nothing where activations are recomputed and
            the backward follows at once. "torch" and "reference" keep what autograd keeps; "rounds" and "nodewise"
            compute it again.
        implementation: see the module; defaults to "tree" on CUDA and "torch" elsewhere. Never falls back.

    Returns:
        [`LinearAttentionOutput`]. "torch" and "reference" compute in fp32, in fp64 for fp64 inputs, whatever autocast
        says; states are fp32 at least in all. Differentiable in q, k, v, g, beta, A_log, dt_bias and initial_states;
        gradients are deterministic.

    Raises:
        ValueError: shapes, dtypes or devices do not agree, the gate options are those that `chunk_kda` refuses, or the
            implementation is unknown or does not serve the device, the dtype, the chunk size or the options.
        ImportError: "tree", "rounds" or "nodewise" without flash-linear-attention.
    """
    _check_inputs(q, k, v, g, beta, initial_states, layout, decay_shape=(*v.shape[:2], q.shape[-1]))
    if use_gate_in_kernel:
        if lower_bound is None and A_log is None:
            raise ValueError("use_gate_in_kernel needs A_log, or lower_bound")
        if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
            raise ValueError(f"safe_gate needs a lower_bound in [-5, 0), got {lower_bound}")
        g = log_decay(g, A_log, dt_bias, lower_bound)
    elif A_log is not None or dt_bias is not None or lower_bound is not None:
        raise ValueError("A_log, dt_bias and lower_bound belong to use_gate_in_kernel=True")
    return _run(
        q, k, v, g, beta, initial_states, layout, scale, use_qk_l2norm, implementation, "kda",
        keep_intermediates=keep_intermediates, safe_gate=safe_gate,
    )  # fmt: skip


def tree_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    layout: ChunkLayout,
    *,
    scale: float | None = None,
    use_qk_l2norm: bool = False,
    initial_states: torch.Tensor | None = None,
    keep_intermediates: bool = False,
    implementation: Implementation | None = None,
) -> LinearAttentionOutput:
    """Gated DeltaNet over the rows of a prefix tree: a delta rule with one decay per head.

    As `tree_kda`, with S' = exp(g_r) S_p and `g` of shape `[C, H]`. On CUDA the chunk size is 64.
    """
    _check_inputs(q, k, v, g, beta, initial_states, layout, decay_shape=tuple(v.shape[:2]))
    return _run(
        q, k, v, g, beta, initial_states, layout, scale, use_qk_l2norm, implementation, "gated_delta_rule",
        keep_intermediates=keep_intermediates,
    )  # fmt: skip


def _check_inputs(q, k, v, g, beta, initial_states, layout: ChunkLayout, decay_shape: tuple[int, ...]) -> None:
    if q.dim() != 3 or q.shape != k.shape or v.dim() != 3:
        raise ValueError(
            f"q and k must be [C, Hk, K] and v [C, H, V], got {[tuple(x.shape) for x in (q, k, v)]}: no batch dim"
        )
    num_rows, num_heads = v.shape[:2]
    if len(q) != num_rows or num_rows != layout.num_rows:
        raise ValueError(f"q has {len(q)} rows and v {num_rows}, but the layout has {layout.num_rows}")
    if num_heads % q.shape[1]:
        raise ValueError(f"the {q.shape[1]} heads of q and k must divide the {num_heads} heads of v")
    if tuple(g.shape) != decay_shape:
        raise ValueError(f"g must have shape {decay_shape}, got {tuple(g.shape)}")
    if beta.shape != v.shape[:2]:
        raise ValueError(f"beta must have shape {tuple(v.shape[:2])}, got {tuple(beta.shape)}")
    if not q.dtype == k.dtype == v.dtype or not all(x.is_floating_point() for x in (q, g, beta)):
        raise ValueError(
            f"q, k, v must share one floating dtype, and g, beta be floating: got {q.dtype}, {k.dtype}, {v.dtype}, "
            f"{g.dtype}, {beta.dtype}"
        )
    if initial_states is not None:
        state_shape = (layout.num_roots, *v.shape[1:2], q.shape[-1], v.shape[-1])
        if initial_states.shape != state_shape:
            raise ValueError(f"initial_states must have shape {state_shape}, got {tuple(initial_states.shape)}")
        if initial_states.dtype != torch.promote_types(q.dtype, torch.float32):
            raise ValueError(f"initial_states must be fp32 (fp64 for fp64 inputs), got {initial_states.dtype}")
    devices = {x.device for x in (q, k, v, g, beta, initial_states, layout.rows) if x is not None}
    if len(devices) > 1:
        raise ValueError(f"inputs and layout must be on one device, got {sorted(map(str, devices))}")


def _run(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_states: torch.Tensor | None,
    layout: ChunkLayout,
    scale: float | None,
    use_qk_l2norm: bool,
    implementation: Implementation | None,
    kind: Literal["kda", "gated_delta_rule"],
    *,
    keep_intermediates: bool,
    safe_gate: bool = False,
) -> LinearAttentionOutput:
    if scale is None:
        scale = q.shape[-1] ** -0.5
    if implementation is None:
        implementation = "tree" if q.is_cuda else "torch"
    if implementation not in get_args(Implementation):
        raise ValueError(f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}")

    if implementation in ("tree", "rounds", "nodewise"):
        _check_cuda(q, layout, implementation, kind)
        packed = load_packed_function(kind)  # also says what is missing
    if implementation == "tree":
        from .linear_attention_tree import run_tree  # needs Triton and flash-linear-attention

        options = {"scale": scale, "use_qk_l2norm": use_qk_l2norm, "safe_gate": safe_gate}
        options["keep_intermediates"] = keep_intermediates
        return LinearAttentionOutput(*run_tree(q, k, v, g, beta, initial_states, layout.sequences, **options))
    if implementation in ("rounds", "nodewise"):
        if implementation == "nodewise" and (initial_states is not None or len(layout.boundary_chunks)):
            raise ValueError("implementation 'nodewise' has no chunk boundaries: no initial states, none requested")
        calls = layout.packed_calls if implementation == "rounds" else layout.node_calls
        options = {"scale": scale, "use_qk_l2norm": use_qk_l2norm, "packed": packed}
        if kind == "kda":
            options |= {"safe_gate": safe_gate, "chunk_size": layout.chunk_size}
        return LinearAttentionOutput(*run_packed_calls(q, k, v, g, beta, initial_states, calls, **options))

    output_dtype = q.dtype
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, g, beta = _prepare(q, k, v, g, beta, scale, use_qk_l2norm)
        if implementation == "reference":
            rows = layout.row_parents, layout.boundary_rows
            output, states = run_recurrence(q, k, v, g, beta, initial_states, *rows)
        elif layout.chunk_size & (layout.chunk_size - 1):
            raise ValueError(
                f"implementation 'torch' needs a chunk size that is a power of two, got {layout.chunk_size}"
            )
        else:
            output, states = run_chunks(q, k, v, g, beta, initial_states, layout)
        return LinearAttentionOutput(output.to(output_dtype), states)


def _check_cuda(q: torch.Tensor, layout: ChunkLayout, implementation: str, kind: str) -> None:
    if not q.is_cuda:
        raise ValueError(
            f"implementation {implementation!r} runs Triton kernels and needs CUDA tensors, got {q.device}: pass "
            "implementation='torch'"
        )
    if q.dtype == torch.float64:
        raise ValueError(f"implementation {implementation!r} has no fp64 kernels: pass implementation='torch'")
    if q.shape[-1] > 256:
        raise ValueError(f"implementation {implementation!r} serves key dims up to 256, got {q.shape[-1]}")
    sizes = (32, 64) if kind == "kda" else (64,)
    if layout.chunk_size not in sizes:
        raise ValueError(
            f"implementation {implementation!r} runs kernels of chunk size {' or '.join(map(str, sizes))}, the layout "
            f"has {layout.chunk_size}"
        )


def _prepare(q, k, v, g, beta, scale: float, use_qk_l2norm: bool) -> tuple[torch.Tensor, ...]:
    """Inputs in fp32 (fp64 stays), normalised, scaled, one q and k head per value head, `g` as `[C, H, K or 1]`."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if use_qk_l2norm:
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q = q * scale
    group = v.shape[1] // q.shape[1]
    if group > 1:
        q, k = q.repeat_interleave(group, dim=1), k.repeat_interleave(group, dim=1)
    return q, k, v, g if g.dim() == 3 else g[..., None], beta
