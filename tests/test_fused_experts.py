"""`experts_implementation="harts"` equals Transformers' own implementations, forward and in every gradient."""

import importlib.util

import pytest
import torch
from tiny_models import TINY, tiny_model
from torch.autograd import gradcheck

from harts_hf import UnsupportedModelError, enable_tree_forward, tree_logprobs
from harts_hf.kernels.expert_rows import add_choices, spread_rows, weighted_swiglu
from harts_hf.models import fused_experts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MOE = [name for name in TINY if any("experts" in key for key in TINY[name])]
assert MOE  # else the tests of models are none


def sorted_pairs(num_tokens, k, num_experts, generator):
    """A token may choose an expert once; some experts get nothing."""
    chosen = torch.rand(num_tokens, num_experts - 1, generator=generator).argsort(1)[:, :k]
    order = torch.sort(chosen.reshape(-1), stable=True).indices
    return order, order.argsort().view(num_tokens, k)


def run(model, ids):
    model.zero_grad()
    logits = model(input_ids=ids, use_cache=False).logits
    weight = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    (logits * weight).sum().backward()
    return logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the stock model's kernels take no CPU tensors")
@pytest.mark.parametrize("model_type", MOE)
def test_a_model_equals_stock(model_type):
    model = enable_tree_forward(tiny_model(model_type))
    ids = torch.randint(2, 250, (2, 37), generator=torch.Generator().manual_seed(0))
    results = []
    for name in ("eager", fused_experts.NAME):
        model.set_experts_implementation(name)
        results.append(run(model, ids))
    (logits, gradients), (fused_logits, fused_gradients) = results
    assert (logits - fused_logits).abs().max() < 1e-4
    assert gradients.keys() == fused_gradients.keys()
    for name, gradient in gradients.items():
        assert (fused_gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("model_type", MOE)
def test_a_tree_forward_equals_stock(model_type):
    sequences = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 4, 3]]
    model = enable_tree_forward(tiny_model(model_type))
    results = []
    for name in ("eager", fused_experts.NAME):
        model.set_experts_implementation(name)
        results.append(torch.cat(tree_logprobs(model, sequences)[0]))
    assert torch.allclose(*results, atol=1e-5)


@pytest.mark.parametrize("num_tokens, k", [(1, 1), (5, 1), (40, 3), (129, 8)])
def test_gradients_of_the_pieces(num_tokens, k):
    generator = torch.Generator().manual_seed(num_tokens)
    order, places = sorted_pairs(num_tokens, k, 12, generator)
    x = torch.randn(num_tokens, 3, dtype=torch.float64, generator=generator).requires_grad_()
    rows = torch.randn(num_tokens * k, 3, dtype=torch.float64, generator=generator).requires_grad_()
    assert torch.equal(spread_rows(x, order, places), x[order // k])
    assert torch.allclose(add_choices(rows, order, places), rows[places].sum(1))
    if num_tokens < 100:
        assert gradcheck(lambda x: spread_rows(x, order, places), x)
        assert gradcheck(lambda rows: add_choices(rows, order, places), rows)
        gate_up = torch.randn(num_tokens * k, 6, dtype=torch.float64, generator=generator).requires_grad_()
        weights = torch.rand(num_tokens * k, dtype=torch.float64, generator=generator).requires_grad_()
        assert gradcheck(weighted_swiglu, (gate_up, weights))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton, or its interpreter")
@pytest.mark.parametrize("num_rows, width", [(1, 4), (9, 48), (3, 1500)])
def test_triton_equals_torch(num_rows, width):
    from harts_hf.kernels import expert_rows_triton

    generator = torch.Generator().manual_seed(width)
    gate_up, weights, grad = (
        torch.randn(*shape, generator=generator).to(DEVICE)
        for shape in ((num_rows, 2 * width), (num_rows,), (num_rows, width))
    )
    leaves = [x.double().requires_grad_() for x in (gate_up, weights)]
    gate, up = leaves[0].chunk(2, dim=-1)
    expected = leaves[1][:, None] * torch.nn.functional.silu(gate) * up
    gradients = torch.autograd.grad((expected * grad.double()).sum(), leaves)
    actual = expert_rows_triton.forward(gate_up, weights), *expert_rows_triton.backward(gate_up, weights, grad)
    for a, e in zip(actual, (expected, *gradients), strict=True):
        assert (a.double() - e).norm() <= 1e-5 * e.norm() + 1e-9


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_error_in_bf16_is_that_of_grouped_mm():
    """Against fp64 of the same bf16 parameters, at sizes that its products take; two runs give the same bits."""
    sizes = {"hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 2}
    experts = next(m for m in tiny_model("qwen3_moe", **sizes).modules() if hasattr(m, "gate_up_proj"))
    experts = experts.to("cuda", torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(0)
    x, grad = (torch.randn(700, 256, generator=generator, device="cuda").bfloat16() for _ in range(2))
    index = torch.rand(700, 8, generator=generator, device="cuda").argsort(1)[:, :2]
    weights = torch.rand(700, 2, generator=generator, device="cuda")

    def results(name, dtype):
        module = experts if dtype == torch.bfloat16 else experts.double()
        module.config._experts_implementation = name
        leaves = [
            x.to(dtype).requires_grad_(),
            weights.double().requires_grad_() if dtype == torch.float64 else weights.clone().requires_grad_(),
        ]
        output = module(leaves[0], index, leaves[1])
        parameters = [module.gate_up_proj, module.down_proj]
        return [output.detach(), *torch.autograd.grad((output * grad.to(dtype)).sum(), [*leaves, *parameters])]

    stock = results("grouped_mm", torch.bfloat16)
    fused, again = (results(fused_experts.NAME, torch.bfloat16) for _ in range(2))
    truth = results("eager", torch.float64)
    assert all(torch.equal(a, b) for a, b in zip(fused, again, strict=True))
    for name, f, s, t in zip(("output", "x", "weights", "gate_up", "down"), fused, stock, truth, strict=True):
        errors = [((a.double() - t).norm() / t.norm()).item() for a in (f, s)]
        assert errors[0] <= 1.1 * errors[1] + 1e-4, (name, errors)


def test_what_it_does_not_serve_is_refused():
    model = tiny_model("qwen3_moe")
    experts = next(m for m in model.modules() if hasattr(m, "gate_up_proj"))
    model.set_experts_implementation(fused_experts.NAME)
    ids = torch.tensor([[2, 3, 4]])
    experts._is_expert_parallel = True
    with pytest.raises(UnsupportedModelError, match="no expert parallelism"):
        model(ids)
    experts._is_expert_parallel, experts.act_fn = False, torch.nn.GELU()
    with pytest.raises(UnsupportedModelError, match="SwiGLU experts"):
        model(ids)
