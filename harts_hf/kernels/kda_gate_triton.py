"""`kda_gate` of `kda_gate.py` in Triton. All in fp32; gradients of parameters are summed in a fixed order."""

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

TILE = 4096  # elements of a program's tile
COLUMNS = 512  # of a tile at most
ROW_GROUPS = 256  # of the backward at most; each leaves a part of the parameters' gradients


class KDAGate(torch.autograd.Function):
    """Of `[..., H, K]`. The backward keeps the input and parameters."""

    @staticmethod
    def forward(ctx, x, A_log, dt_bias, lower_bound, dtype):
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=dtype, device=x.device)
        ctx.save_for_backward(x, A_log, dt_bias)
        ctx.lower_bound = lower_bound
        num_rows, grid_columns, options = _launch(x)
        if y.numel():
            _kda_gate_forward_kernel[(triton.cdiv(num_rows, options["BT"]), grid_columns)](
                x, A_log.contiguous(), dt_bias.contiguous(), y, lower_bound, num_rows, **options
            )
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, A_log, dt_bias = ctx.saved_tensors
        num_rows, grid_columns, options = _launch(x)
        num_tiles = triton.cdiv(num_rows, options["BT"])
        tiles = max(1, triton.cdiv(num_tiles, ROW_GROUPS))
        groups = triton.cdiv(num_tiles, tiles)
        grad_x = torch.empty_like(x)
        rate_parts, bias_parts = torch.empty(2, groups, dt_bias.numel(), dtype=torch.float32, device=x.device)
        if groups:
            _kda_gate_backward_kernel[(groups, grid_columns)](
                x,
                A_log.contiguous(),
                dt_bias.contiguous(),
                grad.contiguous(),
                grad_x,
                rate_parts,
                bias_parts,
                ctx.lower_bound,
                num_rows,
                tiles,
                **options,
            )
        grad_A_log = rate_parts.sum(0).view(x.shape[-2:]).sum(1).view_as(A_log).to(A_log.dtype)
        return grad_x, grad_A_log, bias_parts.sum(0).view_as(dt_bias).to(dt_bias.dtype), None, None


def _launch(x: torch.Tensor) -> tuple[int, int, dict[str, int]]:
    """Rows, tiles of columns, and the constants of both kernels."""
    num_columns = x.shape[-2] * x.shape[-1]
    block_c = min(COLUMNS, triton.next_power_of_2(num_columns))
    options = {"COLUMNS": num_columns, "K": x.shape[-1], "BT": TILE // block_c, "BC": block_c}
    return x.numel() // num_columns, triton.cdiv(num_columns, block_c), options


@triton.jit
def _softplus(x):
    """max(x, 0) + log(1 + u) with u = exp(-|x|), to all digits: log(w) u / (w - 1) with w = 1 + u rounded."""
    u = tl.exp(-tl.abs(x))
    w = 1 + u
    log_1p = tl.where(w == 1, u, tl.log(w) * (u / tl.where(w == 1, 1.0, w - 1)))
    return tl.maximum(x, 0.0) + log_1p


@triton.jit(do_not_specialize=["num_rows"])
def _kda_gate_forward_kernel(
    x,
    A_log,
    dt_bias,
    y,
    lower_bound,
    num_rows,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (row tiles, column tiles), a column being a head's channel. What is past an end is masked."""
    rows = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = columns < COLUMNS
    mask = (rows < num_rows)[:, None] & m_c[None, :]
    at = rows[:, None] * COLUMNS + columns[None, :]
    rate = tl.exp(tl.load(A_log + columns // K, mask=m_c, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + columns, mask=m_c, other=0.0).to(tl.float32)
    z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
    if lower_bound is None:
        result = -rate[None, :] * _softplus(z)
    else:
        result = lower_bound * tl.sigmoid(rate[None, :] * z)
    tl.store(y + at, result.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "tiles"])
def _kda_gate_backward_kernel(
    x,
    A_log,
    dt_bias,
    grad,
    grad_x,
    rate_parts,
    bias_parts,
    lower_bound,
    num_rows,
    tiles,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    BT: tl.constexpr,
    BC: tl.constexpr,
):
    """Grid (groups of `tiles` row tiles, column tiles); a program leaves its rows' sums of `A_log`'s gradient, by
    column, and of `dt_bias`'."""
    group = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BC + tl.arange(0, BC)
    m_c = columns < COLUMNS
    rate = tl.exp(tl.load(A_log + columns // K, mask=m_c, other=0.0).to(tl.float32))
    bias = tl.load(dt_bias + columns, mask=m_c, other=0.0).to(tl.float32)
    rate_total = tl.zeros([BT, BC], dtype=tl.float32)
    bias_total = tl.zeros([BT, BC], dtype=tl.float32)
    for i in range(tiles):
        rows = (group * tiles + i) * BT + tl.arange(0, BT)
        mask = (rows < num_rows)[:, None] & m_c[None, :]
        at = rows[:, None] * COLUMNS + columns[None, :]
        z = tl.load(x + at, mask=mask, other=0.0).to(tl.float32) + bias[None, :]
        b_grad = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
        if lower_bound is None:
            d_z = -b_grad * rate[None, :] * tl.sigmoid(z)
            rate_total += -b_grad * rate[None, :] * _softplus(z)
        else:
            sigmoid = tl.sigmoid(rate[None, :] * z)
            d_z = b_grad * lower_bound * sigmoid * (1 - sigmoid) * rate[None, :]
            rate_total += d_z * z
        bias_total += d_z
        tl.store(grad_x + at, d_z.to(grad_x.dtype.element_ty), mask=mask)
    tl.store(rate_parts + group * COLUMNS + columns, tl.sum(rate_total, 0), mask=m_c)
    tl.store(bias_parts + group * COLUMNS + columns, tl.sum(bias_total, 0), mask=m_c)
