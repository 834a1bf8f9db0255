"""Options of TreeGRPOTrainer."""

from dataclasses import dataclass, field

from trl.trainer.grpo_config import GRPOConfig

WINDOW_COST_ROWS = {"cuda": 24_000}  # default of `window_cost_rows` by device


@dataclass
class TreeGRPOConfig(GRPOConfig):
    r"""
    Configuration class for the [`TreeGRPOTrainer`].

    Takes all options of [`~trl.GRPOConfig`], with the same defaults, and these:

    Parameters:
        max_tokens_per_microbatch (`int`, *optional*, defaults to `32768`):
            Most rows (distinct prefixes) that run in one forward and backward. This, not
            `per_device_train_batch_size`, bounds memory: the whole optimizer step is planned together, across
            gradient-accumulation steps, and split into as few microbatches as fit. The result does not depend on it
            beyond rounding. The default holds a 32k-token episode. A longer one runs in pieces of so many rows with
            `sharing_windows`; without, it runs alone in one microbatch, with a warning.
        sharing_windows (`bool`, *optional*, defaults to `True`):
            Compute a prefix that several microbatches share once: its producer runs first, the microbatches start from
            what it hands over, and its backward runs after theirs. The result does not depend on it beyond rounding;
            rows are saved, and memory is used while a window is open: keys and values of the prefix and, with
            gradient checkpointing, its layers' inputs. Needs `use_reentrant=False`, TRL's default, if
            `gradient_checkpointing` is on.
        max_window_gib (`float`, *optional*):
            Most memory that a window may keep alive, in GiB, estimated from the model's config; not bounded by
            default. Needs `gradient_checkpointing`. Prefixes that would take more are computed in each microbatch.
            Router logits, which an auxiliary loss asks for, are not in the estimate, nor is a dense attention mask.
            The pieces of a trajectory above `max_tokens_per_microbatch` are not bounded.
        offload_producers (`bool`, *optional*, defaults to `False`):
            Keep what the backward of a window's producer needs, apart from what it hands over, in host memory while
            its microbatches run. With `gradient_checkpointing` these are the layers' inputs. Off by default: copies
            cost time, and the inputs are small.
        window_cost_rows (`int`, *optional*):
            Rows that a window must save beside those of its producer to be worth opening: a producer is a forward and
            backward of its own. 24,000 by default on CUDA, where steps of a 7.9B model with a window took as long on
            an H200 as 20,000 and 23,400 rows more than they have, and 0 elsewhere. `harts-hf calibrate` measures the
            cost of a forward and backward without rows: `producer` of its cost model.
        exchange_trajectories (`bool`, *optional*, defaults to `True`):
            With several processes: plan the trajectories of all of them as one step, so that work is even and
            prefixes are shared across processes. Token ids go to every process; the padded tensors of TRL's
            micro-batches go to the processes that run a part of them, and log-probs come back. `False`: each process
            plans and runs its own trajectories, and nothing moves; not with FSDP. The result does not depend on it
            beyond rounding.
        fused_modules (`bool`, *optional*, defaults to `False`):
            Run the norms, SwiGLU layers and KDA forget gates of the model, and of a reference model, in fused kernels
            on CUDA ([`fuse_modules`]). They round once where stock modules may round between, so that results differ
            by rounding; off by default for that reason.

    Raises:
        ValueError: `max_tokens_per_microbatch` is below 1, `max_window_gib` is no size or set without
            `gradient_checkpointing`, `window_cost_rows` is below 0, or an option of sharing windows is set without
            them.
    """

    max_tokens_per_microbatch: int = field(
        default=32768,
        metadata={
            "help": "Most rows (distinct prefixes) that run in one forward and backward. Bounds memory instead of "
            "`per_device_train_batch_size`; the result does not depend on it beyond rounding."
        },
    )
    sharing_windows: bool = field(
        default=True,
        metadata={"help": "Compute a prefix that several microbatches share once. Needs `use_reentrant=False`."},
    )
    max_window_gib: float | None = field(
        default=None,
        metadata={"help": "Most memory that a sharing window may keep alive, in GiB; not bounded by default."},
    )
    offload_producers: bool = field(
        default=False,
        metadata={"help": "Keep what the backward of a sharing window's producer needs in host memory meanwhile."},
    )
    window_cost_rows: int | None = field(
        default=None,
        metadata={"help": "Rows that a sharing window must save beside its producer's; 24,000 on CUDA by default."},
    )
    exchange_trajectories: bool = field(
        default=True,
        metadata={"help": "Plan the trajectories of all processes as one step, and run each where the plan puts it."},
    )
    fused_modules: bool = field(
        default=False,
        metadata={"help": "Run norms, SwiGLU layers and KDA forget gates in fused kernels on CUDA."},
    )

    def __post_init__(self):
        super().__post_init__()
        if self.max_tokens_per_microbatch < 1:
            raise ValueError(f"max_tokens_per_microbatch must be at least 1 row, got {self.max_tokens_per_microbatch}")
        if self.max_window_gib is not None and not 0 <= self.max_window_gib < 2**30:
            raise ValueError(f"max_window_gib must be a size in GiB, or None for no bound, got {self.max_window_gib}")
        of_windows = self.max_window_gib is not None or self.offload_producers or self.window_cost_rows is not None
        if not self.sharing_windows and of_windows:
            raise ValueError("max_window_gib, offload_producers and window_cost_rows belong to sharing_windows=True")
        if self.window_cost_rows is not None and self.window_cost_rows < 0:
            raise ValueError(f"window_cost_rows must be 0 or more, got {self.window_cost_rows}")
        if self.max_window_gib is not None and not self.gradient_checkpointing:
            raise ValueError(
                "max_window_gib needs gradient_checkpointing=True: without it a window keeps all activations of its "
                "producer, which the model's config does not tell"
            )
