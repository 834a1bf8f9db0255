"""Options and inputs that a planned step cannot honour: each is refused with what to do instead."""

from typing import Any

from accelerate.utils import DistributedType, parse_flag_from_env
from transformers import PreTrainedModel
from transformers.distributed.fsdp import is_fsdp_managed_module
from transformers.training_args import OptimizerNames
from trl.trainer.grpo_trainer import GRPOTrainer

from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.sharded import needs_order

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


def refuse_generation_options(args, generates: bool) -> None:
    """Raise for options of generation or scoring that have no effect on finished trajectories, or fail on them.

    Args:
        args: the trainer's config.
        generates (`bool`): completions are generated for evaluation.

    Raises:
        ValueError: names the option and what to do instead.
    """
    if args.mask_truncated_completions:
        raise ValueError(
            "mask_truncated_completions has no effect on finished trajectories: set their completion_mask to 0"
        )
    if args.reward_weights is not None or args.multi_objective_aggregation != "sum_then_normalize":
        raise ValueError("finished trajectories have one reward: combine several before, and leave reward_weights out")
    if args.use_vllm and not generates:
        raise ValueError("use_vllm has no effect on finished trajectories: nothing is generated. Leave it off")
    if args.use_vllm and args.vllm_importance_sampling_correction:
        raise ValueError(
            "finished trajectories have no log-probs of vLLM to correct by: set "
            "vllm_importance_sampling_correction=False, and give old_log_probs if another policy sampled them"
        )
    if args.log_completions and not generates:
        raise ValueError("log_completions has nothing to log: completions are in the dataset. Leave it off")


def refuse_generators(given: dict[str, Any]) -> None:
    """Raise if something that generates or scores completions is given where none are generated.

    Args:
        given: name -> the trainer's argument; None where it is left out.

    Raises:
        ValueError: names the arguments.
    """
    names = [name for name, value in given.items() if value is not None]
    if names:
        raise ValueError(
            f"{', '.join(names)} would have no effect: nothing is generated, and the dataset of finished trajectories "
            "has their rewards or advantages. Leave it out"
        )


def refuse_options(trainer: GRPOTrainer, sharing_windows: bool, exchange_trajectories: bool) -> None:
    """Raise for options that a planned step cannot honour.

    Args:
        trainer: a trainer whose accelerator and model are set up.
        sharing_windows, exchange_trajectories (`bool`): the options of these names.

    Raises:
        NotImplementedError: DeepSpeed, the first FSDP, tensor or context parallelism, a model that is sharded at load
            time, or images.
        ValueError: FSDP that is not on, FSDP with `exchange_trajectories=False`, with trained parameters of several
            dtypes or of a model that is sharded already, `torch_compile`, embedding noise, an optimizer that updates
            in the backward pass, or sharing windows with reentrant gradient checkpointing.
    """
    args = trainer.args
    kwargs = args.gradient_checkpointing_kwargs  # without the key, torch's default holds
    reentrant = kwargs is not None and kwargs.get("use_reentrant", True)
    if sharing_windows and args.gradient_checkpointing and reentrant:
        raise ValueError(
            "sharing windows need gradient checkpointing with use_reentrant=False: in reentrant mode gradients would "
            f"be lost between microbatches, and gradient_checkpointing_kwargs is {kwargs}. Set 'use_reentrant' in it "
            "to False, or set sharing_windows=False."
        )
    _refuse_parallelism(trainer, exchange_trajectories)
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


def _refuse_parallelism(trainer: GRPOTrainer, exchange_trajectories: bool) -> None:
    """Raise for ways of using several processes that a planned step does not run in."""
    accelerator = trainer.accelerator
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise NotImplementedError(
            "DeepSpeed steps the optimizer at each backward, and a planned step has several. Use DDP or FSDP2 "
            "(accelerate launch)."
        )
    if trainer.is_distributed_loading_by_transformers:
        if accelerator.distributed_type == DistributedType.FSDP:
            raise ValueError(
                "the model was sharded while it was loaded, and FSDP of the launcher or of fsdp= would shard it a "
                "second time. Launch without FSDP (examples/accelerate/fsdp2_ep.yaml)."
            )
        _refuse_sharded_model(causal_lm_of(trainer.model), exchange_trajectories)
        return
    parallelism = accelerator.parallelism_config
    if parallelism is not None and (parallelism.tp_size > 1 or parallelism.cp_size > 1 or parallelism.sp_size > 1):
        raise NotImplementedError(
            f"ranks that hold parts of the same sequences are not supported, and parallelism_config is {parallelism}. "
            "Set tp_size, cp_size and sp_size to 1; max_tokens_per_microbatch bounds the memory of long trajectories."
        )
    if accelerator.distributed_type != DistributedType.FSDP:
        # The launcher asks for it by Accelerate's own variable alone.
        if trainer.args.fsdp or parse_flag_from_env("ACCELERATE_USE_FSDP"):
            raise ValueError(
                f"FSDP was asked for, but accelerate runs {accelerator.distributed_type} (on the CPU it ignores FSDP "
                "without a word). Leave FSDP out, or use GPUs."
            )
        return
    if not accelerator.is_fsdp2:
        raise NotImplementedError("FSDP is supported as FSDP2 only: set fsdp_version to 2 in its config")
    if accelerator.state.fsdp_plugin.activation_checkpointing:
        raise ValueError(
            "fsdp_config's activation_checkpointing wraps the layers, which hides them from sharing windows. Set it "
            "to False, and gradient_checkpointing=True."
        )
    dtypes = {parameter.dtype for parameter in trainer.model.parameters() if parameter.requires_grad}
    if len(dtypes) > 1 and accelerator.mixed_precision == "no":
        raise ValueError(
            f"the model has trained parameters of several dtypes, {sorted(map(str, dtypes))}, and FSDP2 wants one: "
            "set bf16=True (mixed precision keeps them in fp32), or load the model with dtype fp32"
        )
    _refuse_local_plans(exchange_trajectories)


def _refuse_sharded_model(model: PreTrainedModel, exchange_trajectories: bool) -> None:
    """Raise for ways of sharding a model at load time that a planned step does not run in."""
    config = model.config.distributed_config
    if not is_fsdp_managed_module(model) or (config.tp_size or 1) > 1 or (config.pp_size or 1) > 1:
        raise NotImplementedError(
            "of models that are sharded while they are loaded, only those with data parallel ranks are supported, and "
            f"distributed_config is {config}. Set fsdp_size (and ep_size), and neither tp_size nor pp_size."
        )
    if needs_order(model):
        raise NotImplementedError(
            f"Transformers shards the convolutions of {model.config.model_type} in a wrong order without a word. Load "
            "the model with harts_hf.load_sharded, which puts them right."
        )
    _refuse_local_plans(exchange_trajectories)


def _refuse_local_plans(exchange_trajectories: bool) -> None:
    if not exchange_trajectories:
        raise ValueError(
            "exchange_trajectories=False lets each process run its own number of microbatches, and FSDP needs the "
            "same on all. Leave it on."
        )
