"""What fidelity.py runs: the model, the inputs of its two parts, and how two runs are compared."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from device_timing import command_line, installed_versions
from distribution_statistics import compare_distributions, compare_experts
from fidelity_runs import Run, chain_targets, microbatch_targets, run_chains, run_microbatch
from gradient_samples import compare_gradients
from handoff_steps import make_chains
from hybrid_model import build_hybrid_model, choose_modules
from rollout_steps import RolloutStep, load_step, set_names

from harts_hf.planning.microbatches import plan_step

MOST_HANDOFFS = 5
GPU_SET = "tau_bench/tree_step"  # real episodes with real branching
PACKAGES = ("torch", "transformers", "triton", "fla-core", "flash-attn-4")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the inputs.

    Attributes:
        chains (`int`): prefixes of the first part, with two trajectories each.
        gap (`int`): tokens between two hand-offs.
        own_tokens (`int`): tokens of a trajectory behind its prefix.
        rows (`int`): most rows of the microbatch.
        max_length (`int`): tokens at which its trajectories are cut.
    """

    chains: int
    gap: int
    own_tokens: int
    rows: int
    max_length: int


SIZES = {"cuda": Sizes(3, 800, 512, 16384, 16384), "cpu": Sizes(2, 100, 30, 600, 200)}


class HandoffPart:
    """Trajectories behind 0 to 5 hand-offs or forks.

    Args:
        model: the hybrid model.
        sizes: of the chains.
        depths: hand-offs to run.
        seed: of the tokens.
    """

    def __init__(self, model, sizes: Sizes, depths: Sequence[int], seed: int):
        vocab_size = model.config.vocab_size
        self.chains = make_chains(sizes.chains, MOST_HANDOFFS, sizes.gap, sizes.own_tokens, vocab_size, seed)
        self.targets = chain_targets(self.chains)
        self.model = model
        self.depths = depths

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Runs by name; the first is "expanded"."""
        return run_chains(self.model, self.chains, self.depths)

    def describe(self) -> dict:
        """Sizes for the record."""
        return {
            "cuts": [chain.cuts for chain in self.chains],
            "trajectory_tokens": [len(chain.sequences[0]) for chain in self.chains],
            "compared_tokens": len(self.targets),
        }


class MicrobatchPart:
    """The microbatch of a step of rollouts that holds the most expanded tokens, with forward and backward.

    Args:
        model: the hybrid model.
        sizes: of the microbatch.
        name: set of rollouts, or None for the default one.
        seed: of the step, the advantages and the ratios.
    """

    def __init__(self, model, sizes: Sizes, name: str | None, seed: int):
        folder = Path(os.environ["HARTS_ROLLOUTS"]) if "HARTS_ROLLOUTS" in os.environ else None
        names = set_names(folder)
        step = load_step(
            name or (GPU_SET if GPU_SET in names else names[0]),
            folder,
            num_tokens=8 * sizes.rows,
            max_length=min(sizes.max_length, sizes.rows),
            vocab_size=model.config.vocab_size,
            thin=model.device.type == "cpu",
            seed=seed,
        )
        microbatches = plan_step(step.sequences, sizes.rows).microbatches
        largest = max(microbatches, key=lambda m: sum(len(step.sequences[i]) for i in m.trajectories))
        members = list(largest.trajectories)
        trajectories = [step.trajectories[i] for i in members]
        self.step: RolloutStep = dataclasses.replace(
            step, trajectories=trajectories, advantages=step.advantages[members]
        )
        self.rows = largest.rows
        self.targets = microbatch_targets(self.step)
        self.model = model
        self.seed = seed

    def runs(self) -> Iterator[tuple[str, Run]]:
        """Runs by name; the first is "expanded"."""
        return run_microbatch(self.model, self.step, self.seed)

    def describe(self) -> dict:
        """Sizes for the record."""
        return {
            "rollouts": self.step.name,
            "remark": self.step.remark,
            "trajectories": len(self.step.trajectories),
            "expanded_tokens": self.step.num_tokens,
            "scored_tokens": self.step.num_scored,
            "rows": self.rows,
            "compared_tokens": len(self.targets),
        }


class FidelityCases:
    """The model and the parts that were asked for.

    Attributes:
        model: of `build_hybrid_model`.
        modules (`str`): "fused" or "stock".
        parts (dict): by name.
        weight_sum (`float`): of the absolute weights: equal in two processes that made the same model.
    """

    def __init__(self, arguments):
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = build_hybrid_model(device, arguments.seed, arguments.layers)
        self.modules = arguments.modules
        choose_modules(self.model, arguments.modules)
        sizes = SIZES[device.type]
        given = {"rows": arguments.rows, "max_length": arguments.max_length}
        sizes = dataclasses.replace(sizes, **{name: size for name, size in given.items() if size is not None})
        make = {
            "handoffs": lambda: HandoffPart(self.model, sizes, arguments.depths, arguments.seed),
            "microbatch": lambda: MicrobatchPart(self.model, sizes, arguments.set, arguments.seed),
        }
        self.parts = {name: make[name]() for name in arguments.parts}
        self.weight_sum = sum(float(p.detach().double().abs().sum()) for p in self.model.parameters())
        self._seed = arguments.seed

    def compare(self, part: str, run: Run, other: Run) -> dict:
        """All statistics of a run next to another one of the same part."""
        weight = self.model.lm_head.weight.detach().float()
        result = compare_distributions(run.hidden, other.hidden, weight, self.parts[part].targets)
        result |= compare_experts(run.experts, other.experts)
        if run.gradients is not None:
            result["loss_difference"] = abs(run.loss - other.loss)
            layer_types = self.model.config.layer_types
            result["gradients"] = compare_gradients(run.gradients, other.gradients, layer_types, weight.device)
        return result

    def describe(self) -> dict:
        """The record before the first run."""
        config = self.model.config
        record = {
            "command": command_line(),
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "versions": installed_versions(*PACKAGES),
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "modules": self.modules,
            "model": {
                "type": config.model_type,
                "layers": config.num_hidden_layers,
                "hidden": config.hidden_size,
                "vocab": config.vocab_size,
                "experts": config.num_local_experts,
                "experts_per_token": config.num_experts_per_tok,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "weight_sum": self.weight_sum,
            },
            "seed": self._seed,
        }
        return record | {name: part.describe() | {"runs": {}} for name, part in self.parts.items()}
