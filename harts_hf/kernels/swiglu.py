"""SwiGLU of two tensors, in one pass over memory forward and one backward. Triton on CUDA, torch elsewhere."""

from typing import Literal

import torch

Implementation = Literal["triton", "torch"]


def swiglu(gate: torch.Tensor, up: torch.Tensor, *, implementation: Implementation | None = None) -> torch.Tensor:
    """`silu(gate) * up`, in fp32, rounded once.

    Args:
        gate, up: of one shape.
        implementation: "triton" (fp32, bf16, fp16) or "torch" (fp64 too, then in fp64); by default the device decides.

    Returns:
        Their shape, in the wider of their dtypes; differentiable in both.

    Raises:
        ValueError: fp64 for Triton.
    """
    dtype = torch.promote_types(gate.dtype, up.dtype)
    if (implementation or ("triton" if gate.is_cuda else "torch")) == "torch":
        compute = torch.promote_types(dtype, torch.float32)
        return (torch.nn.functional.silu(gate.to(compute)) * up.to(compute)).to(dtype)
    if dtype == torch.float64:
        raise ValueError("swiglu in Triton computes in fp32: pass implementation='torch' for fp64")
    from .swiglu_triton import Swiglu

    return Swiglu.apply(gate, up, dtype)
