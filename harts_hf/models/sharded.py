"""Load a checkpoint onto several processes at once, sharded by Transformers: FSDP2, with experts spread over ranks.

Transformers 5.24.0 loads the convolutions of Kimi Delta Attention in a wrong order when it shards them: the q, k and v
parts of `conv1d.weight` are cut for each rank before they are joined, so that rank 0 holds `[q0, k0, v0]` instead of
the first rows of `[q, k, v]`. Nothing warns of it. They are put in order here; this may go once Transformers does.
"""

import torch
import transformers
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.distributed import DistributedConfig

_JOINED = ("bailing_hybrid", "kimi_linear")  # conv1d.weight is joined from three tensors of the checkpoint
_KNOWN_VERSION = "5.24.0"
_MARK = "_harts_is_in_order"


def load_sharded(
    model_id: str,
    *,
    fsdp_size: int,
    ep_size: int = 1,
    dp_replicate_size: int = 1,
    mixed_precision: bool = False,
    **kwargs,
) -> PreTrainedModel:
    """A causal LM whose parameters are spread over the processes. Collective.

    Args:
        model_id: name or path of the checkpoint.
        fsdp_size, dp_replicate_size: parameters are sharded over the one and repeated over the other; their product is
            the number of processes.
        ep_size: experts are spread over so many processes; divides `fsdp_size`.
        mixed_precision: compute in bf16, with parameters and gradients in fp32.
        **kwargs: for `from_pretrained`. `dtype` is fp32 by default: FSDP2 wants one dtype, and models with linear
            attention keep some parameters in fp32 whatever is asked for.

    Raises:
        ValueError: parameters have several dtypes.
        RuntimeError: an architecture whose convolutions need to be put in order, in a version of Transformers of which
            the order is not known, or with heads that do not divide evenly.
    """
    config = DistributedConfig(
        fsdp_size=fsdp_size,
        ep_size=ep_size,
        dp_replicate_size=dp_replicate_size,
        fsdp_mixed_precision=mixed_precision,
    )
    kwargs.setdefault("dtype", torch.float32)
    model = AutoModelForCausalLM.from_pretrained(model_id, distributed_config=config, **kwargs)
    dtypes = {parameter.dtype for parameter in model.parameters()}
    if len(dtypes) > 1:
        raise ValueError(
            f"the model has parameters of several dtypes, {sorted(map(str, dtypes))}, and FSDP2 wants one: leave "
            "dtype at fp32, and set mixed_precision=True to compute in bf16"
        )
    if needs_order(model):
        _put_in_order(model)
        setattr(model, _MARK, True)
    return model


def needs_order(model: PreTrainedModel) -> bool:
    """Whether the model was sharded while it was loaded and its convolutions are, or may be, out of order."""
    config = model.config.distributed_config
    is_sharded = config is not None and (config.fsdp_size or 1) > 1
    return is_sharded and model.config.model_type in _JOINED and not getattr(model, _MARK, False)


def _put_in_order(model: PreTrainedModel) -> None:
    if transformers.__version__ != _KNOWN_VERSION:
        raise RuntimeError(
            f"in which order Transformers {transformers.__version__} shards the convolutions of "
            f"{model.config.model_type} is not known: use transformers=={_KNOWN_VERSION}"
        )
    for name, parameter in model.named_parameters():
        if not (name.endswith("conv1d.weight") and isinstance(parameter, DTensor)):
            continue
        mesh, placements = parameter.device_mesh, parameter.placements
        (axis,) = [axis for axis, placement in enumerate(placements) if placement == Shard(0)]
        parts = mesh.size(axis)
        loaded = parameter.detach().full_tensor()  # [rank, q or k or v, rows]
        if len(loaded) % (3 * parts):
            raise RuntimeError(f"{name} has {len(loaded)} channels, which {parts} ranks do not divide evenly")
        joined = loaded.unflatten(0, (parts, 3, -1)).transpose(0, 1).flatten(0, 2)
        local = distribute_tensor(joined.contiguous(), mesh, placements, src_data_rank=None).to_local()
        with torch.no_grad():
            parameter.to_local().copy_(local)
