"""Options and inputs that a planned step cannot honour: each is refused with what to do instead."""

from typing import Any

from accelerate.utils import DistributedType
from transformers.training_args import OptimizerNames
from trl import GRPOTrainer

MULTIMODAL_INPUTS = ("pixel_values", "image_grid_thw", "num_images", "image_sizes", "num_tiles")


def refuse_multimodal(values: dict[str, Any]) -> None:
    given = [name for name, value in values.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"TreeGRPOTrainer trains text only, got {given}: two trajectories with equal ids and different images share "
            "no row. Use trl.GRPOTrainer for multimodal inputs."
        )


def refuse_options(trainer: GRPOTrainer) -> None:
    """Raise for options that a planned step cannot honour."""
    args = trainer.args
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed steps the optimizer at each backward, and a planned step has several. Use DDP (accelerate launch)."
        )
    if kind == DistributedType.FSDP or trainer.is_distributed_loading_by_transformers:
        raise NotImplementedError("sharded models need the same number of microbatches on every rank. Use DDP.")
    if args.torch_compile:
        raise ValueError("torch_compile=True is not supported: every step has another tree. Leave it off.")
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO):
        raise ValueError(f"optim={args.optim} updates in the backward pass, and a planned step has several.")
    for name, dataset in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        columns = set(getattr(dataset, "column_names", None) or ())
        if columns & {"image", "images"}:
            raise NotImplementedError(
                f"{name} has an image column; TreeGRPOTrainer trains text only. Use trl.GRPOTrainer for it."
            )
