"""GPU time of a job by component of the model, told by the names of its kernels."""

import re
import time
from collections.abc import Callable

import torch

# The first pattern that is found in a kernel's name decides. The head's projections are dense GEMMs by name.
COMPONENTS = (
    ("fused norms, SwiGLU layers and forget gates", r"_(rms_norm|swiglu|kda_gate)_(forward|backward)_kernel"),
    ("experts' SwiGLU", r"swiglu"),
    ("softmax attention", r"flash|fmha|attention|attn|cudnn.*sdpa"),
    (
        "convolution",
        r"_conv_forward_kernel|_weight_kernel|_read_kernel|causal_conv|depthwise|dgrad|wgrad|implicit_con",
    ),
    ("linear attention", r"kda|delta|wy_|recompute_w_u|gla_|cumsum_vector|l2norm|_forward_kernel|_backward_kernel"),
    (
        "gathers and sums of rows, of linear attention and experts",
        r"_gather_kernel|_gather_normalized|_sum_kernel|_sum_gradient_kernel",
    ),
    ("head, without its GEMMs", r"_fold_kernel|_gradient_kernel|logprob|log_prob|softmax|cross_entropy"),
    ("MoE grouped GEMM", r"grouped|GroupProblem|group_mm|group_gemm|moe"),
    ("dense GEMM", r"nvjet|gemm|cutlass|cublas|xmma|splitK|gemv"),
    ("norms and reductions", r"rms_norm|layer_norm|reduce_kernel|reduction"),
    (
        "routing and token order",
        r"topk|TopK|sort|radix|scan|index|scatter|gather|histogram|bincount|searchsorted|where",
    ),
    ("copies", r"copy|Memcpy|Memset|CatArray|fill|FillFunctor|transpose"),
    ("elementwise", r"elementwise|vectorized|pointwise|triton_poi"),
)
OTHER = "other"


def component_of(kernel: str) -> str:
    """Component that a kernel's name belongs to."""
    for component, pattern in COMPONENTS:
        if re.search(pattern, kernel, flags=re.IGNORECASE):
            return component
    return OTHER


def profile_components(job: Callable[[], None], longest: int = 25) -> dict:
    """Run the job once under the profiler.

    Args:
        job: launches work on the current CUDA device.
        longest: how many single kernels to name.

    Returns:
        dict with `seconds` (wall, under the profiler), `gpu_seconds` (sum over kernels), `by_component` (seconds, the
        longest first) and `kernels` (seconds and calls of the longest ones).
    """
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        begin = time.perf_counter()
        job()
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    kernels = [e for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda e: -e.self_device_time_total)
    totals: dict[str, float] = {}
    for event in kernels:
        component = component_of(event.key)
        totals[component] = totals.get(component, 0.0) + event.self_device_time_total / 1e6
    return {
        "seconds": round(seconds, 4),
        "gpu_seconds": round(sum(totals.values()), 4),
        "by_component": {name: round(totals[name], 4) for name in sorted(totals, key=lambda n: -totals[n])},
        "kernels": {
            e.key[:120]: {"seconds": round(e.self_device_time_total / 1e6, 4), "calls": e.count}
            for e in kernels[:longest]
        },
    }
