"""On a GPU the tree forward is as close to the fp32 truth as the stock model's own kernels are."""

import copy
import importlib.metadata

import numpy as np
import pytest
import torch
from forests import random_forest, shapes
from packaging.version import Version
from test_tree_forward import expanded_logprobs, gradients
from tiny_models import HYBRIDS, TINY, VOCAB, tiny_model

from harts_hf import disable_tree_forward, enable_tree_forward, tree_logprobs
from harts_hf.models.families import FAMILIES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# flash-linear-attention's kernels need heads of at least 16 channels.
GPU_SIZES = {
    "bailing_hybrid": {"head_dim": 32},
    "kimi_linear": {"linear_head_dim": 32},
    "olmo_hybrid": {"linear_key_head_dim": 32, "linear_value_head_dim": 64},
    **{
        name: {"linear_key_head_dim": 32, "linear_value_head_dim": 32}
        for name in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    },
}


def on_gpu(function, model, sequences, dtype):
    """Log-probs on the host, and every gradient, of a copy of the model on the GPU."""
    moved = copy.deepcopy(model).to("cuda", dtype)
    log_probs, entropies = function(moved, sequences)
    log_probs, entropies = ([x.cpu() for x in values] for values in (log_probs, entropies))
    return torch.cat(log_probs).detach(), gradients(moved, log_probs, entropies, 0)


def rms(values):
    return torch.cat([v.double().flatten() for v in values]).square().mean().sqrt()


def skip_without_a_gated_delta_backward(model_type):
    """flash-linear-attention 0.6 refuses this backward where Triton miscompiles it (its issue 640)."""
    if FAMILIES[model_type].linear_attention == "gated_delta_rule" and torch.cuda.get_device_capability()[0] == 9:
        version = Version(importlib.metadata.version("triton"))
        if Version("3.4.0") <= version < Version("3.7.1"):
            pytest.skip(f"Gated DeltaNet's backward needs Triton 3.7.1 or later on Hopper, this is {version}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_error_is_that_of_the_stock_model(model_type, dtype):
    skip_without_a_gated_delta_backward(model_type)
    model = tiny_model(model_type, **GPU_SIZES.get(model_type, {}))
    if dtype == torch.bfloat16 and any("experts" in name for name, _ in model.named_parameters()):
        pytest.skip("a top-k choice on a rounding edge is no error of the tree")
    rng = np.random.default_rng(2)
    cases = [random_forest(rng, VOCAB) for _ in range(2)]
    if model_type in HYBRIDS:
        cases += [sequences for name, sequences in shapes(rng, VOCAB) if name in ("caterpillar", "fork at 64")]
    for sequences in cases:
        # The tree on the CPU is equal to the stock model there, and runs where the stock model would ask for a GPU.
        enable_tree_forward(model)
        found = tree_logprobs(model, sequences)
        truth = torch.cat(found[0]).detach()
        true_gradients = gradients(model, *found, 0)
        disable_tree_forward(model)

        def one_by_one(moved, trajectories):
            pairs = [expanded_logprobs(moved, [s]) for s in trajectories]
            return [p[0][0] for p in pairs], [p[1][0] for p in pairs]

        stock, stock_gradients = on_gpu(one_by_one, model, sequences, dtype)
        enable_tree_forward(model)
        tree, tree_gradients = on_gpu(tree_logprobs, model, sequences, dtype)
        disable_tree_forward(model)
        assert rms([tree - truth]) <= 1.5 * rms([stock - truth]) + 1e-6
        true_gradients = {name: gradient for name, gradient in true_gradients.items() if gradient is not None}
        scale = rms(true_gradients.values())
        tree_error, stock_error = (
            rms([found[name].cpu() - gradient for name, gradient in true_gradients.items()]) / scale
            for found in (tree_gradients, stock_gradients)
        )
        assert tree_error <= 1.5 * stock_error + 1e-6


@pytest.mark.parametrize("model_type", ["bailing_hybrid", "qwen3_5_text"])
def test_two_runs_give_the_same_bits(model_type):
    model = enable_tree_forward(tiny_model(model_type, **GPU_SIZES[model_type]))
    sequences = random_forest(np.random.default_rng(3), VOCAB)
    first, second = (on_gpu(tree_logprobs, model, sequences, torch.float32) for _ in range(2))
    assert torch.equal(first[0], second[0])
