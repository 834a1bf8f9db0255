"""A small hybrid checkpoint with random weights and a tokenizer trained on given text, for runs without a download.

The model has the layers of a large hybrid: Kimi Delta Attention, every fourth layer MLA, and a mixture of experts. It
learns nothing useful; it takes the same code path as a real checkpoint and runs on a laptop.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, BailingHybridConfig, PreTrainedTokenizerFast

# ChatML. The `generation` block marks what the model sampled: a turn's text and the token that ends it.
CHAT_TEMPLATE = """
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' }}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}
{%- else -%}
{{ message['content'] + '<|im_end|>' }}
{%- endif -%}
{{ '\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""


def train_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with a chat template.

    Args:
        texts: what to learn the merges from.
        vocab_size (`int`): most tokens, the three special ones included.

    Returns:
        `PreTrainedTokenizerFast`: pad is `<|endoftext|>`, EOS is `<|im_end|>`, padding on the left.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
    )


def save_small_checkpoint(directory: Path, texts: Iterable[str], seed: int = 0) -> None:
    """Write model and tokenizer to `directory`, to be loaded with `from_pretrained`.

    Args:
        directory (`Path`): made if it does not exist; files of the same names are replaced.
        texts: training text of the tokenizer.
        seed (`int`): seed of the random weights.
    """
    tokenizer = train_tokenizer(texts)
    config = BailingHybridConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=4,
        layer_group_size=4,  # three KDA layers, then one MLA layer
        first_k_dense_replace=1,  # one dense MLP, then three layers of experts
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        num_local_experts=8,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        num_mtp_layers=0,
        initializer_range=0.1,  # wide enough for log-probs to differ from token to token
        max_position_embeddings=32768,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
