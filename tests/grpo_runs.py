"""Runs of a GRPO trainer on fixed rollouts, recorded for comparison: gradients at each update, logs, parameters."""

import warnings
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from tiny_models import VOCAB, byte_tokenizer, tiny_model
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, TrainerCallback

from harts_hf import TreeGRPOConfig

NUM_GENERATIONS = 4
NOT_COMPARED = ("time", "runtime", "per_second", "tree/", "flos", "memory")


@dataclass
class Run:
    """What one training run did: per optimizer step the gradient of every parameter, and all that was logged."""

    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    logs: list[dict[str, float]] = field(default_factory=list)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)
    trainer: object = None


class Rollouts:
    """A `rollout_func` that returns the same trajectories whatever the policy.

    A prompt of 20 tokens, a trunk of 30 shared by all completions of the prompt, with a stretch of environment tokens,
    then branches that fork again. Completions contain EOS inside, two are equal, and one ends
    where others go on.
    """

    def __init__(self, num_prompts: int = 2, truncate: bool = False, sampler_noise: float | None = None):
        rng = np.random.default_rng(0)
        self.num_prompts = num_prompts
        self.sampler_noise = sampler_noise  # of the sampler's log-probs, around the policy's
        self.trajectories = []
        for _ in range(num_prompts):
            prompt = rng.integers(2, VOCAB, 20).tolist()
            trunk = rng.integers(2, VOCAB, 30).tolist()
            trunk[11] = 1  # an EOS inside the completion
            fork = trunk + rng.integers(2, VOCAB, 25).tolist()
            completions = [
                *[fork + rng.integers(2, VOCAB, 31).tolist() + [1]] * 2,  # two equal trajectories
                trunk + rng.integers(2, VOCAB, 5).tolist() + [1],
                fork[:40] if truncate else fork[:40] + [1],
            ]
            for completion in completions:
                mask = [0 if 8 <= t < 18 else 1 for t in range(len(completion))]
                self.trajectories.append((prompt, completion, mask))

    def __call__(self, prompts, trainer):
        assert len(prompts) % len(self.trajectories) == 0
        chosen = self.trajectories * (len(prompts) // len(self.trajectories))
        return {
            "prompt_ids": [p for p, _, _ in chosen],
            "completion_ids": [c for _, c, _ in chosen],
            "env_mask": [m for _, _, m in chosen],
            "logprobs": None if self.sampler_noise is None else self._sampler_logprobs(chosen, trainer),
        }

    def _sampler_logprobs(self, chosen, trainer):
        generator = torch.Generator().manual_seed(1)
        logprobs = []
        for prompt, completion, _ in chosen:
            ids = torch.tensor([prompt + completion])
            with torch.no_grad():
                logits = trainer.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            exact = torch.log_softmax(logits, dim=-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
            noise = self.sampler_noise * torch.randn(exact.shape, generator=generator)
            logprobs.append((exact + noise).tolist())
        return logprobs


def reward(completion_ids, **kwargs):
    """Differs between the completions of a prompt."""
    return [float(sum(ids) % 7) + 0.1 * len(ids) for ids in completion_ids]


def save_checkpoint(folder: Path, model_type: str = "bailing_hybrid", **overrides) -> str:
    """A tiny checkpoint with its tokenizer, as a hub id would give."""
    model = tiny_model(model_type, **{"num_hidden_layers": 2, "vocab_size": VOCAB, **overrides})
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, gathered from all ranks if it is sharded."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


class _Recorder(TrainerCallback):
    def __init__(self, run: Run):
        self.run = run

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        gradients = {n: whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        self.run.gradients.append(gradients)


def train(
    trainer_class,
    checkpoint: str,
    output_dir: Path,
    rollouts: Rollouts | None = None,
    trainer_options: dict | None = None,
    prepare=None,
    resume: str | None = None,
    quiet: bool = True,
    lora=None,
    eval_dataset=None,
    dtype: torch.dtype = torch.float32,
    load=None,
    **config,
) -> Run:
    """Train `trainer_class` on the rollouts with SGD (Adam would turn rounding into steps) and record it."""
    rollouts = rollouts or Rollouts()
    options = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_generations": NUM_GENERATIONS,
        "max_completion_length": 96,
        "max_steps": 1,
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "shuffle_dataset": False,
        **config,
    }
    run = Run()
    trainer_options = dict(trainer_options or {})
    if "train_dataset" not in trainer_options:
        trainer_options["train_dataset"] = Dataset.from_dict({"prompt": ["x", "y"][: rollouts.num_prompts] * 8})
        trainer_options["reward_funcs"] = reward
        trainer_options["rollout_func"] = rollouts
    if lora is not None:
        trainer_options["peft_config"] = lora
    if eval_dataset is not None:
        trainer_options["eval_dataset"] = eval_dataset
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if quiet else "default")
        trainer = trainer_class(
            model=load() if load else AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype),
            args=TreeGRPOConfig(**options),
            processing_class=byte_tokenizer(),
            callbacks=[_Recorder(run)],
            **trainer_options,
        )
        if prepare is not None:
            prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
    run.trainer = trainer
    run.logs = trainer.state.log_history
    run.parameters = {n: whole(p) for n, p in trainer.model.named_parameters()}
    return run


def gradient_error(run: Run, reference: Run) -> float:
    """Largest over the steps of the relative norm of the difference of the whole gradient."""
    assert len(run.gradients) == len(reference.gradients) > 0
    worst = 0.0
    for actual, expected in zip(run.gradients, reference.gradients, strict=True):
        assert actual.keys() == expected.keys()
        difference = sum((actual[n] - expected[n]).double().square().sum() for n in expected).sqrt()
        worst = max(worst, (difference / sum(g.double().square().sum() for g in expected.values()).sqrt()).item())
    return worst


def parameter_error(run: Run, reference: Run) -> float:
    """Largest over steps and parameters of the relative error of one parameter's gradient."""
    worst = 0.0
    for actual, expected in zip(run.gradients, reference.gradients, strict=True):
        scale = max(g.norm() for g in expected.values())
        for name, gradient in expected.items():
            error = (actual[name] - gradient).norm() / gradient.norm().clamp(min=1e-4 * scale)
            worst = max(worst, error.item())
    return worst


def metric_errors(run: Run, reference: Run) -> dict[str, float]:
    """Relative difference of every metric that the reference logs; a missing metric is an error of infinity."""
    errors: dict[str, float] = {}
    assert len(run.logs) == len(reference.logs)
    for actual, expected in zip(run.logs, reference.logs, strict=True):
        for name, value in expected.items():
            if any(part in name for part in NOT_COMPARED):
                continue
            if name not in actual:
                errors[name] = float("inf")
            elif value is None or actual[name] is None:
                errors[name] = 0.0 if value == actual[name] else float("inf")
            else:
                errors[name] = max(
                    errors.get(name, 0.0), abs(actual[name] - value) / max(abs(value), abs(actual[name]), 1e-3)
                )
    return errors
