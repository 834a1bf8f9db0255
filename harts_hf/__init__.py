"""harts_hf: train agentic RL rollouts as prefix trees, with Transformers and TRL.

Names are imported on first use, so that `import harts_hf` is quick and planning works without torch.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_MODULE_OF = {
    "PrefixTree": "tree",
    "plan_rounds": "planning.rounds",
    "plan_step": "planning.microbatches",
    "DataCollatorWithPrefixTree": "batch",
    "UnsupportedModelError": "models.enable",
    "enable_tree_forward": "models.enable",
    "disable_tree_forward": "models.enable",
    "fuse_modules": "models.fused_modules",
    "unfuse_modules": "models.fused_modules",
    "load_sharded": "models.sharded",
    "tree_logprobs": "forward",
    "ExpertBiasCallback": "trainers.expert_bias",
    "TreeGRPOConfig": "trainers.grpo_config",
    "TreeGRPOTrainer": "trainers.grpo_trainer",
}

if TYPE_CHECKING:
    from .batch import DataCollatorWithPrefixTree
    from .forward import tree_logprobs
    from .models.enable import UnsupportedModelError, disable_tree_forward, enable_tree_forward
    from .models.fused_modules import fuse_modules, unfuse_modules
    from .models.sharded import load_sharded
    from .planning.microbatches import plan_step
    from .planning.rounds import plan_rounds
    from .trainers.expert_bias import ExpertBiasCallback
    from .trainers.grpo_config import TreeGRPOConfig
    from .trainers.grpo_trainer import TreeGRPOTrainer
    from .tree import PrefixTree

__all__ = [
    "DataCollatorWithPrefixTree",
    "ExpertBiasCallback",
    "PrefixTree",
    "TreeGRPOConfig",
    "TreeGRPOTrainer",
    "UnsupportedModelError",
    "disable_tree_forward",
    "enable_tree_forward",
    "fuse_modules",
    "load_sharded",
    "plan_rounds",
    "plan_step",
    "tree_logprobs",
    "unfuse_modules",
]


def __getattr__(name: str):
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
