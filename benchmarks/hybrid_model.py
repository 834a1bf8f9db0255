"""The hybrid model that the whole-model benchmarks run: Ling-3.0-tiny's shape, random weights.

On a GPU it has 7.9 billion parameters, made on the device in bf16: three layers of Kimi Delta Attention and one of MLA
in each group of four, and 128 experts in all layers but the first. On the CPU it is a small model of the same kinds of
layers, in fp32.
"""

import torch
from transformers import AutoModelForCausalLM, BailingHybridConfig, PreTrainedModel

from harts_hf import fuse_modules, unfuse_modules

MODULES = ("fused", "stock")  # what runs norms, SwiGLU layers and forget gates

PARAMETERS = 7.9e9  # of the GPU's model with all of its layers
_LING_TINY = {
    "vocab_size": 157184,
    "hidden_size": 1536,
    "intermediate_size": 4096,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_local_experts": 128,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    # Widths that are the config's defaults: MLA 128 + 64 and 128, latents of 512, KDA heads of 128.
}
_SMALL = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "eos_token_id": 1,
}


def hybrid_config(device: torch.device | str, num_layers: int | None = None) -> BailingHybridConfig:
    """Config of the model for a device: Ling-3.0-tiny's shape on CUDA, a small one elsewhere.

    Args:
        device: where the model will run.
        num_layers: another number of layers, the first dense and every fourth MLA; 24 and 4 by default.
    """
    sizes = dict(_LING_TINY if torch.device(device).type == "cuda" else _SMALL)
    if num_layers is not None:
        sizes["num_hidden_layers"] = num_layers
    return BailingHybridConfig(first_k_dense_replace=1, layer_group_size=4, num_mtp_layers=0, **sizes)


def build_hybrid_model(
    device: torch.device | str, seed: int = 0, num_layers: int | None = None, recompute: bool = True
) -> PreTrainedModel:
    """The model with random weights, in training mode, made on the device.

    bf16 on CUDA, but for what the architecture keeps in fp32 (routers, short convolutions, decay parameters); fp32
    elsewhere. Attention goes through Transformers' "sdpa" entry, which a tree forward takes over.

    Args:
        device: where the parameters are made; no copy is made elsewhere.
        seed: of the weights.
        num_layers: as in `hybrid_config`.
        recompute: full activation recomputation: non-reentrant gradient checkpointing of every layer.

    Raises:
        RuntimeError: the full model on CUDA is not within 3% of 7.9 billion parameters.
    """
    device = torch.device(device)
    config = hybrid_config(device, num_layers)
    torch.manual_seed(seed)
    with device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
            attn_implementation="sdpa",
        )
    parameters = sum(p.numel() for p in model.parameters())
    if device.type == "cuda" and num_layers is None and abs(parameters / PARAMETERS - 1) > 0.03:
        raise RuntimeError(f"expected about {PARAMETERS:.1e} parameters, the model has {parameters:.3e}")
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def default_modules() -> str:
    """Of `MODULES`: fused on CUDA, the only place where fused ones differ."""
    return "fused" if torch.cuda.is_available() else "stock"


def choose_modules(model: PreTrainedModel, modules: str) -> None:
    """Run the model's norms, SwiGLU layers and forget gates fused or as in Transformers: one of `MODULES`."""
    (fuse_modules if modules == "fused" else unfuse_modules)(model)
