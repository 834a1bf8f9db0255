"""Options and inputs that a planned step cannot honour: each is refused with what to do instead."""

from typing import Any

from accelerate.utils import DistributedType
from transformers.training_args import OptimizerNames
from trl.trainer.grpo_trainer import GRPOTrainer

MULTIMODAL_INPUTS = ("pixel_values", "image_grid_thw", "num_images", "image_sizes", "num_tiles")


def refuse_multimodal(values: dict[str, Any]) -> None:
    """Raise if a multimodal input is given.

    Args:
        values: name -> value of TRL's multimodal inputs; None where there is none.

    Raises:
        NotImplementedError: names the inputs.
    """
    given = [name for name, value in values.items() if value is not None]
    if given:
        raise NotImplementedError(
            f"TreeGRPOTrainer trains text only, got {given}: two trajectories with equal ids and different images "
            "share no row. Use trl.GRPOTrainer for multimodal inputs."
        )


def refuse_options(trainer: GRPOTrainer) -> None:
    """Raise for options that a planned step cannot honour.

    Raises:
        NotImplementedError: DeepSpeed, FSDP, a model that is sharded at load time, or images.
        ValueError: `torch_compile`, embedding noise, or an optimizer that updates in the backward pass.
    """
    args = trainer.args
    kind = trainer.accelerator.distributed_type
    if kind == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed steps the optimizer at each backward, and a planned step has several. Use DDP "
            "(accelerate launch)."
        )
    if kind == DistributedType.FSDP or trainer.is_distributed_loading_by_transformers:
        raise NotImplementedError("sharded models need the same number of microbatches on every rank. Use DDP.")
    if args.torch_compile:
        raise ValueError("torch_compile=True is not supported: every step has another tree. Leave it off.")
    if args.optim in (OptimizerNames.LOMO, OptimizerNames.ADALOMO) or "layerwise" in args.optim:
        raise ValueError(f"optim={args.optim} updates in the backward pass, and a planned step has several.")
    if args.neftune_noise_alpha is not None:
        raise ValueError(
            "neftune_noise_alpha would give a shared row one noise instead of one per trajectory. Leave it off."
        )
    for name, dataset in (("train_dataset", trainer.train_dataset), ("eval_dataset", trainer.eval_dataset)):
        columns = set(getattr(dataset, "column_names", None) or ())
        if columns & {"image", "images"}:
            raise NotImplementedError(
                f"{name} has an image column; TreeGRPOTrainer trains text only. Use trl.GRPOTrainer for it."
            )
