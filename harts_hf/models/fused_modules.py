"""Fused forwards for a model's norms, SwiGLU layers and KDA forget gates: [`fuse_modules`], [`unfuse_modules`].

Stock modules make a pass over memory per operation, mostly in fp32: eight in an RMSNorm, twelve in a gated one. The
fused forwards make one, and one in the backward (`kernels/rms_norm.py`, `swiglu.py`, `kda_gate.py`). They round once,
at their end, where the stock ones may also round between; dtypes of results and gradients are the stock ones. All work
on a row alone, so that a tree and its trajectories run apart still get the same.
"""

import importlib.util
from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor
from transformers.activations import SiLUActivation

from harts_hf.kernels.kda_gate import kda_gate
from harts_hf.kernels.rms_norm import rms_norm
from harts_hf.kernels.swiglu import swiglu

from .causal_lm import causal_lm_of
from .families import family_of

_ATTRIBUTE = "_harts_fused_forward"  # on the module, so that copies and pickles have it too
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_modules(model):
    """Give the norms, SwiGLU layers and KDA forget gates of `model` fused forwards, for CUDA.

    Works on the instances of the classes in this file's table; modules with another activation, or whose `forward` is
    an instance's own already, are left alone. On the CPU, in fp64 and on DTensors the original forward runs, bit for
    bit. Parameters, state dict and hooks stay as they are; weights are read at each call. Does nothing on modules that
    are fused already.

    Args:
        model: a Transformers causal LM of a supported family or a PEFT model around one, wrapped by FSDP2 or not.

    Returns:
        the same model.

    Raises:
        UnsupportedModelError: the architecture is not supported.
        TypeError: `model` is neither a Transformers causal LM nor a PEFT model around one.
        ImportError: the model is on CUDA and Triton is not installed, or another minor version of Transformers is.
    """
    base = causal_lm_of(model)
    modeling_module = family_of(base).modeling_module
    if any(p.is_cuda for p in base.parameters()) and importlib.util.find_spec("triton") is None:
        raise ImportError("fused modules need Triton on CUDA: install harts_hf[gpu]")
    for module in base.modules():
        run = _fused_forward_of(module, modeling_module)
        if run is not None and "forward" not in module.__dict__:
            module.forward = _FusedForward(module, run)
            setattr(module, _ATTRIBUTE, module.forward)
    return model


def unfuse_modules(model):
    """Take the fused forwards away. Does nothing on a model without them; returns the model.

    Raises:
        RuntimeError: something else has wrapped a module's forward since, so it cannot be put back.
    """
    fused = [module for module in causal_lm_of(model).modules() if _ATTRIBUTE in module.__dict__]
    for module in fused:
        if module.__dict__.get("forward") is not getattr(module, _ATTRIBUTE):
            raise RuntimeError(
                f"the forward of a {type(module).__name__} was wrapped after fuse_modules: undo that first"
            )
    for module in fused:
        del module.forward
        delattr(module, _ATTRIBUTE)
    return model


class _FusedForward:
    """A module's forward: fused where kernels take the inputs, else the class's. A class so that it pickles."""

    def __init__(self, module: torch.nn.Module, run: Callable):
        self.module = module
        self.run = run

    def __call__(self, *args, **kwargs):
        if not kwargs and _kernels_take(*args, *self.module.parameters(recurse=False)):
            with torch.cuda.device_of(args[0]):  # Triton launches on the current device
                return self.run(self.module, *args)
        return type(self.module).forward(self.module, *args, **kwargs)


def _kernels_take(*tensors: torch.Tensor) -> bool:
    return all(x.is_cuda and x.dtype in _DTYPES and not isinstance(x, DTensor) for x in tensors)


def _fused_forward_of(module: torch.nn.Module, modeling_module: str) -> Callable | None:
    """The function that runs this module fused, or None for what is not served."""
    for kind in type(module).__mro__:  # FSDP2 derives a class of its own
        if kind.__module__ == modeling_module and kind.__name__ in _FUSED:
            break
    else:
        return None
    if type(module).forward is not kind.forward:
        return None
    run = _FUSED[kind.__name__]
    if run is _run_mlp and not isinstance(module.act_fn, (torch.nn.SiLU, SiLUActivation)):
        return None
    if run is _run_gated_norm and module.activation not in ("sigmoid", "silu"):
        return None
    return run


def _run_norm(norm, x):
    dtype = torch.promote_types(x.dtype, norm.weight.dtype)
    return rms_norm(x, norm.weight, epsilon=norm.variance_epsilon, dtype=dtype)


def _run_norm_in_input_dtype(norm, x):
    return rms_norm(x, norm.weight, epsilon=norm.variance_epsilon)


def _run_zero_centered_norm(norm, x):
    return rms_norm(x, norm.weight, epsilon=norm.eps, zero_centered=True)


def _run_gated_norm(norm, x, gate):
    return rms_norm(x, norm.weight, epsilon=norm.variance_epsilon, gate=gate, activation=norm.activation)


def _run_mlp(mlp, x):
    gate, up = mlp.gate_proj(x), mlp.up_proj(x)
    return mlp.down_proj(swiglu(gate, up))


def _run_bailing_gate(forget_gate, x):
    heads = (*x.shape[:2], forget_gate.num_heads, forget_gate.head_dim)
    return kda_gate(
        forget_gate.f_proj(x).view(heads),
        forget_gate.A_log,
        forget_gate.dt_bias,
        lower_bound=forget_gate.lower_bound if forget_gate.safe_gate else None,
        dtype=x.dtype,
    )


def _run_kimi_gate(forget_gate, x):
    heads = (*x.shape[:2], forget_gate.num_heads, forget_gate.head_dim)
    x = forget_gate.f_b_proj(forget_gate.f_a_proj(x)).view(heads)
    return kda_gate(x, forget_gate.A_log, forget_gate.dt_bias, lower_bound=None, dtype=torch.float32)


# Classes of the modeling modules in `families.py`, and what runs them; read in Transformers 5.24.
_FUSED: dict[str, Callable] = {
    "BailingHybridRMSNorm": _run_norm,
    "BailingHybridRMSNormGated": _run_gated_norm,
    "BailingHybridMLP": _run_mlp,
    "BailingHybridForgetGate": _run_bailing_gate,
    "KimiLinearRMSNorm": _run_norm,
    "KimiLinearRMSNormGated": _run_gated_norm,
    "KimiLinearMLP": _run_mlp,
    "KimiLinearForgetGate": _run_kimi_gate,
    "Qwen3NextRMSNorm": _run_zero_centered_norm,
    "Qwen3NextRMSNormGated": _run_gated_norm,
    "Qwen3NextMLP": _run_mlp,
    "Qwen3_5RMSNorm": _run_zero_centered_norm,
    "Qwen3_5RMSNormGated": _run_gated_norm,
    "Qwen3_5MLP": _run_mlp,
    "Qwen3_5MoeRMSNorm": _run_zero_centered_norm,
    "Qwen3_5MoeRMSNormGated": _run_gated_norm,
    "Qwen3_5MoeMLP": _run_mlp,
    "OlmoHybridRMSNorm": _run_norm_in_input_dtype,
    "OlmoHybridRMSNormGated": _run_gated_norm,
    "OlmoHybridMLP": _run_mlp,
    "Qwen3RMSNorm": _run_norm,
    "Qwen3MLP": _run_mlp,
    "Qwen3MoeRMSNorm": _run_norm,
    "Qwen3MoeMLP": _run_mlp,
    "LlamaRMSNorm": _run_norm,
    "LlamaMLP": _run_mlp,
}
