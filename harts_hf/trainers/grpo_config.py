"""Options of TreeGRPOTrainer."""

from dataclasses import dataclass, field

from trl.trainer.grpo_config import GRPOConfig


@dataclass
class TreeGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`TreeGRPOTrainer`].

    Takes all options of [`~trl.GRPOConfig`], with the same defaults, and this one:

    Parameters:
        max_tokens_per_microbatch (`int`, *optional*, defaults to `32768`):
            Most rows (distinct prefixes) that run in one forward and backward. This, not
            `per_device_train_batch_size`, bounds memory: the whole optimizer step is planned together, across
            gradient-accumulation steps, and split into as few microbatches as fit. The result does not depend on it
            beyond rounding. The default holds a 32k-token episode. A trajectory that is longer runs alone, with a
            warning.

    Raises:
        ValueError: `max_tokens_per_microbatch` is below 1.
    """

    max_tokens_per_microbatch: int = field(
        default=32768,
        metadata={
            "help": "Most rows (distinct prefixes) that run in one forward and backward. Bounds memory instead of "
            "`per_device_train_batch_size`; the result does not depend on it beyond rounding."
        },
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_tokens_per_microbatch < 1:
            raise ValueError(f"max_tokens_per_microbatch must be at least 1 row, got {self.max_tokens_per_microbatch}")
