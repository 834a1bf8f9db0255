"""Train on finished rollouts as prefix trees with `TreeGRPOTrainer`, and compare with the stock `GRPOTrainer`.

    accelerate launch --num_processes 1 examples/train_tree_grpo.py

With no arguments it makes a small hybrid checkpoint with random weights, takes three optimizer steps on the bundled
tau-bench rollouts, takes the same steps with the stock trainer, prints a table, and draws the tree of the first step.
With your model and your rollouts it is a training script; every option of `TreeGRPOConfig` is accepted:

    accelerate launch examples/train_tree_grpo.py --model-name-or-path MODEL --dataset rollouts.jsonl --lora \
        --max-length 32768 --max-tokens-per-microbatch 65536 --per-device-train-batch-size 64 --learning-rate 1e-6

A rollout has `messages`, `reward` and `group`, or is tokenized already: `input_ids`, `completion_mask`, `reward` and
`group`, optionally `old_log_probs`.
"""

import copy
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from accelerate import PartialState
from chat_trajectories import load_rollouts, trajectories_from_chats
from peft import LoraConfig
from small_model import save_small_checkpoint
from transformers import AutoTokenizer, HfArgumentParser, TrainerCallback
from tree_picture import draw_tree
from trl import GRPOTrainer

from harts_hf import TreeGRPOConfig, TreeGRPOTrainer, load_sharded
from harts_hf.trainers.trajectories import TrajectoryDatasetMixin

# Defaults of the run without a model name: three steps of 16 rollouts (4 tasks), in a few minutes on two CPU cores.
SMALL_RUN = {
    "output_dir": "outputs/tree_grpo",
    "max_steps": 3,
    "per_device_train_batch_size": 1,  # the stock trainer is fastest so here; the tree trainer plans all 16 together
    "gradient_accumulation_steps": 16,
    "num_generations": 4,
    "optim": "sgd",  # Adam turns rounding errors of near-zero gradients into steps of full size
    "learning_rate": 0.1,
    "max_tokens_per_microbatch": 16384,
    "gradient_checkpointing": False,
    "bf16": False,
    "dataloader_pin_memory": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
}


@dataclass
class ExampleArguments:
    """Options of this script; those of the trainer are `TreeGRPOConfig`'s."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Checkpoint folder or hub id. By default a small hybrid model is made."}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "File, saved dataset or hub id of rollouts. By default the bundled ones."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of a hub dataset."})
    max_length: int = field(default=2048, metadata={"help": "Tokens at which a chat is cut."})
    step_wise: bool = field(
        default=False, metadata={"help": "Train one sample per turn of the model, with all before it as context."}
    )
    keep_tool_schemas: bool = field(
        default=False, metadata={"help": "Keep the tools' schemas in the bundled rollouts: 2,500 tokens a chat."}
    )
    lora: bool = field(default=False, metadata={"help": "Train LoRA adapters of rank 16 on all linear layers."})
    ep_size: int | None = field(
        default=None,
        metadata={
            "help": "Shard the model over all processes while it is loaded, its experts over so many of them; needs "
            "`--save-only-model` or `--save-strategy no`."
        },
    )
    compare_stock: bool | None = field(
        default=None,
        metadata={"help": "Take the same steps with the stock GRPOTrainer too. By default with the small model only."},
    )


class StockTrainer(TrajectoryDatasetMixin, GRPOTrainer):
    """TRL's trainer on finished rollouts: it differs in where batches come from, in nothing else."""


@dataclass(frozen=True)
class Run:
    """What one training run logged.

    Attributes:
        seconds (`list[float]`): wall-clock time of each optimizer step.
        logs (`list[dict[str, float]]`): logged metrics of each optimizer step.
    """

    seconds: list[float]
    logs: list[dict[str, float]]

    def mean(self, name: str) -> float:
        return statistics.mean(log[name] for log in self.logs)


class StepTimer(TrainerCallback):
    """Wall-clock seconds of each optimizer step."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        self.seconds.append(time.perf_counter() - self._start)


def main() -> None:
    example, config = parse_arguments()
    output_dir = Path(config.output_dir)
    rollouts = load_rollouts(example.dataset, example.dataset_split, example.keep_tool_schemas)

    checkpoint = example.model_name_or_path
    if checkpoint is None:
        checkpoint = str(output_dir / "small_model")
        with PartialState().main_process_first():
            if PartialState().is_main_process:
                texts = [message["content"] for chat in rollouts["messages"] for message in chat]
                save_small_checkpoint(Path(checkpoint), texts, seed=config.seed)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)

    if "input_ids" in rollouts.column_names:
        dataset = rollouts
    else:
        dataset = trajectories_from_chats(rollouts, tokenizer, example.max_length, example.step_wise)
        if PartialState().is_main_process:
            print(f"{len(dataset)} trajectories from {len(rollouts)} chats, cut at {example.max_length} tokens")

    def train(trainer_class) -> tuple[GRPOTrainer, Run]:
        if PartialState().is_main_process:
            print(f"\n{trainer_class.__name__}")
        timer = StepTimer()
        model = checkpoint
        if example.ep_size is not None:
            model = load_sharded(checkpoint, fsdp_size=PartialState().num_processes, ep_size=example.ep_size)
        trainer = trainer_class(
            model=model,
            args=copy.copy(config),
            train_dataset=dataset,
            processing_class=tokenizer,
            peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if example.lora else None,
            callbacks=[timer],
        )
        trainer.train()
        return trainer, Run(timer.seconds, [log for log in trainer.state.log_history if "loss" in log])

    trainer, tree = train(TreeGRPOTrainer)
    trainer.save_model(config.output_dir)
    compare = example.compare_stock if example.compare_stock is not None else example.model_name_or_path is None
    stock = train(StockTrainer)[1] if compare else None
    if trainer.is_world_process_zero():
        if tree.logs:  # a run shorter than logging_steps logs nothing
            print_table(config, tree, stock)
        picture = output_dir / "rollout_tree.png"
        draw_first_step(trainer, picture)
        print(f"\nModel saved to {output_dir}, picture of the first step's tree to {picture}")


def parse_arguments() -> tuple[ExampleArguments, TreeGRPOConfig]:
    """Options of the script and of the trainer, with the small run's defaults where no model is named."""
    parser = HfArgumentParser([ExampleArguments, TreeGRPOConfig])
    if parser.parse_known_args()[0].model_name_or_path is None:
        parser.set_defaults(**SMALL_RUN)
    example, config = parser.parse_args_into_dataclasses()
    return example, config


def print_table(config: TreeGRPOConfig, tree: Run, stock: Run | None) -> None:
    """Work and time of an optimizer step, and the loss and gradient norm of each step."""
    tokens = tree.mean("tree/expanded_tokens")
    # Processes that plan a step together log what all of them did, the others what the first did.
    processes = PartialState().num_processes if config.exchange_trajectories else 1
    micro_batches = config.gradient_accumulation_steps * processes
    trajectories = config.per_device_train_batch_size * micro_batches
    counts = [
        ("per step" if processes > 1 else "per step and process", "tree", "stock"),
        ("trajectories", trajectories, trajectories),
        ("expanded tokens", tokens, tokens),
        ("tokens computed", tree.mean("tree/rows"), tokens),
        ("compression", f"{tree.mean('tree/compression'):.2f}x", "1.00x"),
        ("microbatches", tree.mean("tree/microbatches"), micro_batches),
        ("linear-attention rounds", tree.mean("tree/rounds"), "-"),
        ("replayed tokens", tree.mean("tree/replay_tokens"), "-"),
        (
            "seconds, median",
            f"{statistics.median(tree.seconds):.2f}",
            f"{statistics.median(stock.seconds):.2f}" if stock else "-",
        ),
    ]
    print()
    for label, of_tree, of_stock in counts:
        values = [of_tree, of_stock] if stock else [of_tree]
        texts = [value if isinstance(value, str) else f"{value:,.0f}" for value in values]
        print(f"{label:<26}" + "".join(f"{text:>14}" for text in texts))
    if stock is None:
        return
    print()
    print(f"{'step':<6}{'loss, tree':>16}{'stock':>16}{'grad norm, tree':>20}{'stock':>16}{'difference':>14}")
    for i, (a, b) in enumerate(zip(tree.logs, stock.logs, strict=True), start=1):
        difference = abs(a["grad_norm"] - b["grad_norm"]) / max(b["grad_norm"], 1e-12)
        print(
            f"{i:<6}{a['loss']:>16.7f}{b['loss']:>16.7f}{a['grad_norm']:>20.7f}{b['grad_norm']:>16.7f}{difference:>14.1e}"
        )


def draw_first_step(trainer: GRPOTrainer, path: Path) -> None:
    """Draw the tree of the trajectories of the first optimizer step."""
    step = next(iter(trainer.get_train_dataloader()))
    score = "reward" if "reward" in step[0] else "advantage"
    draw_tree(
        path,
        input_ids=[trajectory["input_ids"] for trajectory in step],
        completion_masks=[trajectory["completion_mask"] for trajectory in step],
        scores=[trajectory[score] for trajectory in step],
        score_name=score,
        labels=[str(trajectory.get("group", "")) for trajectory in step],
    )


if __name__ == "__main__":
    main()
