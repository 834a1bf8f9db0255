"""Tiny models of every supported family, with random weights that make mistakes visible, and a byte tokenizer.

Default initialisation hides errors: decay forgets the past within a few tokens and a scale of 0.02 makes all logits
equal. Here decay is slow, so that a state that leaks or is lost changes what comes thousands of tokens later, and
weights are large enough for log-probs to spread over several nats.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

VOCAB = 260

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "moe_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "n_group": 2,
    "topk_group": 1,
}
_GATED_DELTA = {
    "head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}

TINY = {
    "bailing_hybrid": {
        **_COMMON,
        **_MLA,
        "head_dim": 8,
        "layer_group_size": 2,
        "first_k_dense_replace": 1,
        "num_mtp_layers": 0,
    },
    "kimi_linear": {
        **_COMMON,
        **_MLA,
        "n_group": 1,
        "linear_head_dim": 8,
        "linear_num_heads": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "qwen3_next": {**_COMMON, **_GATED_DELTA, **_MOE},
    "qwen3_5_text": {**_COMMON, **_GATED_DELTA},
    "qwen3_5_moe_text": {**_COMMON, **_GATED_DELTA, **_MOE},
    "olmo_hybrid": {**_COMMON, "layer_types": ["linear_attention", "full_attention"] * 2},
    "qwen3": {
        **_COMMON,
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 24,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen3_moe": {**_COMMON, **_MOE, "head_dim": 16},
    "llama": {**_COMMON},
}
HYBRIDS = ("bailing_hybrid", "kimi_linear", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid")


def tiny_model(model_type: str, seed: int = 0, **overrides) -> torch.nn.Module:
    """A tiny causal LM in fp32 on the CPU, in eval mode."""
    config = AutoConfig.for_model(model_type, **{**TINY[model_type], **overrides})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("conv1d.weight"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
            elif name.endswith("A_log"):
                parameter.zero_()
            elif name.endswith("dt_bias"):
                # softplus or sigmoid of about -6: a decay of exp(-0.002) to exp(-0.02) a token
                parameter.copy_(-6 + 0.5 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def recompute_activations(model, use_reentrant=False):
    """Recompute each layer's activations in the backward pass of a model in training mode."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": use_reentrant})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of `VOCAB` ids at most: pad is 0, EOS is 1."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {"<pad>": 0, "<eos>": 1}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
