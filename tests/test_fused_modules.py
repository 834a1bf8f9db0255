"""Fused norms, SwiGLU layers and forget gates equal the stock modules, in values and every gradient.

On the CPU the fused forwards run the torch twins of their kernels; `test_fused_kernels.py` holds Triton to those.
"""

import contextlib
import copy
import importlib.util
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forests import shapes
from test_tree_forward import gradients
from test_tree_forward_gpu import GPU_SIZES, on_gpu, rms
from tiny_models import TINY, VOCAB, recompute_activations, tiny_model
from transformers import GPT2Config, GPT2LMHeadModel

from harts_hf import UnsupportedModelError, enable_tree_forward, fuse_modules, tree_logprobs, unfuse_modules
from harts_hf.models import fused_modules, tree_forward
from harts_hf.models.families import FAMILIES

SERVED = ("RMSNorm", "RMSNormGated", "MLP", "ForgetGate")  # ends of classes' names
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
without_gpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="with a GPU the stock model's kernels take no CPU tensors"
)


@pytest.fixture
def twins(monkeypatch):
    """Fused forwards run on the CPU too, with the kernels' twins."""
    monkeypatch.setattr(fused_modules, "_kernels_take", lambda *tensors: True)


def is_fused(module):
    return isinstance(module.__dict__.get("forward"), fused_modules._FusedForward)


def random_weights(model):
    """Weights that make mistakes visible: those of norms are ones or zeros at first."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and name.endswith("weight"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def one_of_each_class(model):
    return {type(module).__name__: module for module in model.modules() if is_fused(module)}


def inputs_of(module, dtype, device="cpu"):
    """Tensors that the module is called with: of hidden states, or of heads and gates."""
    generator = torch.Generator().manual_seed(3)
    name = type(module).__name__
    if "Norm" in name:
        shapes = [(2, 9, 3, module.weight.numel())] * (2 if name.endswith("Gated") else 1)
    else:
        first = next(child for child in module.modules() if isinstance(child, torch.nn.Linear))
        shapes = [(2, 9, first.in_features)]
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_() for shape in shapes]


def run(forward, module, inputs):
    """Output, and gradients of inputs and parameters, by name."""
    module.zero_grad()
    inputs = [x.detach().requires_grad_() for x in inputs]
    output = forward(*inputs)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(4)).bfloat16().to(output)  # exact in all
    output.backward(grad)
    found = {"output": output.detach(), **{f"input {i}": x.grad for i, x in enumerate(inputs)}}
    return found | {name: p.grad.clone() for name, p in module.named_parameters()}


def stock_forward(module):
    return type(module).forward.__get__(module)


def relative_error(found, truth):
    return ((found.double().cpu() - truth.cpu()).norm() / (truth.cpu().norm() + 1e-12)).item()


def truth_of(module, inputs):
    """The fused formula's twin in fp64, with the same values; stock modules compute in fp32 at most."""
    exact = copy.deepcopy(module).cpu().double()
    forward = exact.forward.run
    return run(lambda *x: forward(exact, *x), exact, [x.detach().cpu().double() for x in inputs])


def check_against_stock(module, dtype, device):
    inputs = inputs_of(module, dtype, device)
    stock, fused = run(stock_forward(module), module, inputs), run(module.forward, module, inputs)
    again = run(module.forward, module, inputs)
    truth = truth_of(module, inputs)
    assert fused.keys() == stock.keys() == truth.keys()
    for name, value in fused.items():
        assert value.dtype == stock[name].dtype and torch.equal(value, again[name]), name
        errors = relative_error(value, truth[name]), relative_error(stock[name], truth[name])
        assert errors[0] <= 1.1 * errors[1] + (1e-5 if dtype == torch.float32 else 1e-4), (name, errors)


@pytest.mark.parametrize("model_type", TINY)
def test_which_modules_are_fused(model_type):
    model = fuse_modules(tiny_model(model_type))
    modeling_module = FAMILIES[model_type].modeling_module
    for module in model.modules():
        kind = type(module)
        assert is_fused(module) == (kind.__module__ == modeling_module and kind.__name__.endswith(SERVED)), kind


@without_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_twins_equal_stock_modules(model_type, dtype, twins):
    model = fuse_modules(random_weights(tiny_model(model_type))).to(dtype)
    for module in one_of_each_class(model).values():
        check_against_stock(module, dtype, "cpu")


@without_gpu
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_results_have_the_stock_dtype(model_type, weight_dtype, twins):
    """Of bf16 rows and fp32 weights or the reverse, in the norms; of parameters in fp32 in forget gates."""
    model = fuse_modules(tiny_model(model_type)).to(weight_dtype)
    for name, module in one_of_each_class(model).items():
        if "Norm" in name:
            inputs = inputs_of(module, torch.float32 if weight_dtype == torch.bfloat16 else torch.bfloat16)
            stock, fused = (run(f, module, inputs) for f in (stock_forward(module), module.forward))
            assert [x.dtype for x in fused.values()] == [x.dtype for x in stock.values()], name
            assert relative_error(fused["output"], stock["output"].double()) < 0.01


@without_gpu
@pytest.mark.parametrize("model_type", TINY)
def test_autocast(model_type, twins):
    model = fuse_modules(random_weights(tiny_model(model_type)))
    for module in one_of_each_class(model).values():
        inputs = inputs_of(module, torch.float32)
        with torch.autocast("cpu", torch.bfloat16):
            stock, fused = (run(f, module, inputs) for f in (stock_forward(module), module.forward))
        for name, value in fused.items():
            assert value.dtype == stock[name].dtype
            assert relative_error(value, stock[name].double()) < 0.02, name


def test_the_wrong_formula_is_seen(twins, monkeypatch):
    """The negative control of the tests above."""
    module = one_of_each_class(fuse_modules(random_weights(tiny_model("qwen3_next"))))["Qwen3NextRMSNorm"]
    monkeypatch.setattr(
        module.forward, "run", lambda norm, x: fused_modules.rms_norm(x, norm.weight, epsilon=norm.eps)
    )
    inputs = inputs_of(module, torch.float32)
    stock, fused = (run(f, module, inputs) for f in (stock_forward(module), module.forward))
    assert relative_error(fused["output"], stock["output"].double()) > 0.1


@without_gpu
@pytest.mark.parametrize("model_type", TINY)
def test_a_model_equals_stock(model_type, twins):
    """In training mode with recomputation; a tree forward too."""
    model = enable_tree_forward(random_weights(tiny_model(model_type))).train()
    recompute_activations(model)
    sequences = [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8, 4, 3]]

    def both():
        ids = torch.arange(2, 40)[None]
        logits = model(input_ids=ids, use_cache=False).logits.detach()
        return (
            logits,
            torch.cat(tree_logprobs(model, sequences)[0]).detach(),
            gradients(model, *tree_logprobs(model, sequences), 0),
        )

    stock = both()
    fuse_modules(model)
    fused = both()
    assert torch.allclose(stock[0], fused[0], atol=1e-3) and torch.allclose(stock[1], fused[1], atol=1e-4)
    stock_gradients = {n: g for n, g in stock[2].items() if g is not None}
    assert stock_gradients.keys() == {n for n, g in fused[2].items() if g is not None}
    error = rms([fused[2][n] - g for n, g in stock_gradients.items()]) / rms(stock_gradients.values())
    assert error < 1e-4


@without_gpu
@pytest.mark.parametrize("model_type", ["bailing_hybrid", "llama"])
def test_on_the_cpu_the_stock_forward_runs(model_type):
    model = tiny_model(model_type)
    ids = torch.arange(2, 40)[None]
    names = list(model.state_dict())
    expected = model(ids).logits
    assert fuse_modules(model) is model
    assert torch.equal(model(ids).logits, expected)
    assert list(model.state_dict()) == names


def test_undo_and_repetition():
    model = fuse_modules(tiny_model("bailing_hybrid"))
    forwards = [m.forward for m in model.modules() if is_fused(m)]
    assert forwards == [m.forward for m in fuse_modules(model).modules() if is_fused(m)]
    assert unfuse_modules(model) is model
    plain = tiny_model("bailing_hybrid")
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        assert module.__dict__.keys() == other.__dict__.keys()
    unfuse_modules(model)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_is_fused_and_stands_alone(copied, twins):
    model = fuse_modules(tiny_model("llama"))
    other = copied(model)
    fused = [m for m in other.modules() if is_fused(m)]
    assert len(fused) == sum(map(is_fused, model.modules())) and all(m.forward.module is m for m in fused)
    unfuse_modules(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert other(torch.arange(2, 20)[None]).logits.any()


def test_lora(twins):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(
        target_modules=["gate_proj", "down_proj"], modules_to_save=["norm"], init_lora_weights=False
    )
    ids = torch.arange(2, 40)[None]
    found = []
    for fuse_first in (True, False, None):
        torch.manual_seed(0)
        model = tiny_model("llama")
        if fuse_first:
            fuse_modules(model)
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config)
        if fuse_first is False:
            fuse_modules(model)
        loss = model(ids).logits.logsumexp(-1).sum()
        loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert any("lora_A" in name for name in found[0]) and any("modules_to_save" in name for name in found[0])
    for fused in found[:2]:
        assert fused.keys() == found[2].keys()
        for name, gradient in found[2].items():
            assert torch.allclose(fused[name], gradient, rtol=1e-3, atol=1e-5), name


def test_kernels_run_on_the_device_of_their_inputs(twins, monkeypatch):
    """Triton launches on the current device, which need not be the model's. Without CUDA: the contexts are counted."""
    entered = []

    @contextlib.contextmanager
    def device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    model = enable_tree_forward(fuse_modules(tiny_model("llama")))
    inside = []

    def recorded(function, name):
        def run(*args, **kwargs):
            inside.append((name, len(entered)))
            return function(*args, **kwargs)

        return run

    for module, name in ((fused_modules, "rms_norm"), (fused_modules, "swiglu"), (tree_forward, "linear_log_probs")):
        monkeypatch.setattr(module, name, recorded(getattr(module, name), name))
    model(torch.arange(2, 20)[None])
    assert set(inside) == {("rms_norm", 1), ("swiglu", 1)}
    inside.clear()
    tree_logprobs(model, [[5, 6, 7], [5, 6, 9]])
    assert set(inside) == {("rms_norm", 2), ("swiglu", 2), ("linear_log_probs", 1)}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_model_on_another_device_than_the_current():
    ids = torch.arange(2, 20)[None]
    model = fuse_modules(tiny_model("llama"))
    expected = model(ids).logits
    found = model.to("cuda:1")(ids.to("cuda:1")).logits
    assert torch.cuda.current_device() == 0 and torch.allclose(found.cpu(), expected, atol=1e-3)


def test_what_is_left_alone():
    model = tiny_model("llama", hidden_act="gelu")
    own = model.model.norm
    own.forward = stock_forward(own)
    fuse_modules(model)
    assert not is_fused(own) and not any(is_fused(layer.mlp) for layer in model.model.layers)
    assert is_fused(model.model.layers[0].input_layernorm)

    class Doubled(type(own)):
        def forward(self, x):
            return 2 * super().forward(x)

    model = tiny_model("llama")
    model.model.norm.__class__ = Doubled
    assert not is_fused(fuse_modules(model).model.norm)


def test_a_class_that_fsdp_derives_is_served(twins):
    model = tiny_model("llama")
    norm = model.model.norm
    norm.__class__ = type("FSDPLlamaRMSNorm", (type(norm),), {})
    assert is_fused(fuse_modules(model).model.norm)


def test_refusals(monkeypatch):
    with pytest.raises(UnsupportedModelError, match="gpt2"):
        fuse_modules(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=1, vocab_size=10)))
    with pytest.raises(TypeError, match="causal LM"):
        fuse_modules(torch.nn.Linear(2, 2))
    model = fuse_modules(tiny_model("llama"))
    forward = model.model.norm.forward
    model.model.norm.forward = lambda x: forward(x)
    with pytest.raises(RuntimeError, match="LlamaRMSNorm was wrapped"):
        unfuse_modules(model)
    assert is_fused(model.model.layers[0].mlp)

    model = tiny_model("llama")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(model, "parameters", lambda: [SimpleNamespace(is_cuda=True)])
    with pytest.raises(ImportError, match="Triton"):
        fuse_modules(model)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_error_of_modules_on_a_gpu(model_type, dtype):
    """No worse than the stock modules' against fp64, and two runs give the same bits."""
    model = fuse_modules(random_weights(tiny_model(model_type))).to("cuda", dtype)
    for module in one_of_each_class(model).values():
        check_against_stock(module, dtype, "cuda")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", TINY)
def test_error_of_a_model_on_a_gpu(model_type, dtype):
    """Log-probs and all gradients of a tree against the CPU in fp32; with all experts chosen, as a top-k choice on a
    rounding edge is no error of the modules."""
    sizes = {name: 8 for name in TINY[model_type] if name == "num_experts_per_tok"}
    sizes |= {"topk_group": TINY[model_type].get("n_group", 1)} if "topk_group" in TINY[model_type] else {}
    sizes |= GPU_SIZES.get(model_type, {})
    model = enable_tree_forward(random_weights(tiny_model(model_type, **sizes)))
    sequences = dict(shapes(np.random.default_rng(2), VOCAB))["caterpillar"]
    found = tree_logprobs(model, sequences)
    truth, true_gradients = torch.cat(found[0]).detach(), gradients(model, *found, 0)
    stock = on_gpu(tree_logprobs, model, sequences, dtype)
    fuse_modules(model)
    fused, again = (on_gpu(tree_logprobs, model, sequences, dtype) for _ in range(2))
    true_gradients = {name: gradient for name, gradient in true_gradients.items() if gradient is not None}
    scale = rms(true_gradients.values())

    def errors(run):
        differences = [run[1][name].cpu() - gradient for name, gradient in true_gradients.items()]
        return rms([run[0] - truth]), rms(differences) / scale

    # Single roundings differ by chance and travel through all layers: a model's error spreads more than a module's.
    for of_fused, of_stock in zip(errors(fused), errors(stock), strict=True):
        assert of_fused <= 1.5 * of_stock + 1e-6
    assert torch.equal(fused[0], again[0])
    for name in true_gradients:
        assert torch.equal(fused[1][name], again[1][name]), name
