"""Router biases follow the loads of all trajectories, shared tokens counted as often as they are shared."""

import pytest
import torch
from grpo_runs import Rollouts, save_checkpoint, train
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from harts_hf import ExpertBiasCallback, TreeGRPOTrainer, UnsupportedModelError

RATE = 0.25


def biases(model):
    return {name: buffer.clone() for name, buffer in model.named_buffers() if "correction_bias" in name}


def expanded_loads(checkpoint):
    """Tokens of each expert of each router when every trajectory runs alone in the stock model."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    loads = {}

    def count(name, chosen, num_experts):
        load = torch.bincount(chosen.flatten(), minlength=num_experts)
        loads[name] = loads.get(name, 0) + load

    for name, module in model.named_modules():
        if type(module).__name__ == "BailingHybridTopkRouter":
            module.register_forward_hook(
                lambda _module, _args, output, name=name: count(name, output[2], output[0].shape[-1])
            )
    with torch.no_grad():
        for prompt, completion, _ in Rollouts().trajectories:
            model(input_ids=torch.tensor([prompt + completion]), use_cache=False)
    return loads


@pytest.mark.parametrize("max_tokens", [4096, 60])
def test_biases_move_against_the_expanded_load(tmp_path, max_tokens):
    checkpoint = save_checkpoint(tmp_path / "checkpoint", num_hidden_layers=4)
    before = biases(AutoModelForCausalLM.from_pretrained(checkpoint))

    def prepare(trainer):
        trainer.add_callback(ExpertBiasCallback(trainer, RATE))

    run = train(
        TreeGRPOTrainer, checkpoint, tmp_path / "run", prepare=prepare, max_tokens_per_microbatch=max_tokens,
        save_strategy="steps", save_steps=1,
    )  # fmt: skip
    after, loads = biases(run.trainer.model), expanded_loads(checkpoint)
    assert len(loads) == len(after) == 3  # the first layer is dense
    for name, bias in after.items():
        load = loads[name.removesuffix(".e_score_correction_bias")].float()
        assert load.max() > load.min()
        assert torch.equal(bias, before[name] + RATE * torch.sign(load.mean() - load))
    saved = biases(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(saved[name], bias) for name, bias in after.items())


def test_what_has_no_bias_is_refused(tmp_path):
    class Stop(Exception):
        pass

    def prepare(trainer):
        ExpertBiasCallback(trainer)
        raise Stop

    hybrid = save_checkpoint(tmp_path / "hybrid")
    for rate in (0.0, -1.0):
        with pytest.raises(ValueError, match="update_rate must be positive"):
            train(TreeGRPOTrainer, hybrid, tmp_path / "run", prepare=lambda t, rate=rate: ExpertBiasCallback(t, rate))
    with pytest.raises(ValueError, match="adapter checkpoints"):
        lora = LoraConfig(target_modules=["o_proj"])
        train(TreeGRPOTrainer, hybrid, tmp_path / "run", prepare=prepare, lora=lora)
    for model_type in ("qwen3_moe", "llama"):
        checkpoint = save_checkpoint(tmp_path / model_type, model_type)
        with pytest.raises(UnsupportedModelError, match="correction bias"):
            train(TreeGRPOTrainer, checkpoint, tmp_path / "run", prepare=prepare)
