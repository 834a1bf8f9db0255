"""The forward of a compact batch: through the stock backbone, then log-probs from its last hidden states.

The batch travels as one keyword argument through the stock modeling code, so recomputation replays it, and wrappers
(DDP, FSDP, PEFT) pass it through.
"""

import contextlib
import inspect
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from harts_hf.batch import CompactBatch, compact_batch_from_features
from harts_hf.kernels.log_probs import linear_log_probs

from .attention_seam import install_attention_seam
from .boundary_seam import hand_over, number_layers, recompute_final_norm, refuse_reentrant_checkpointing
from .dropout import refuse_dropout
from .families import Family, UnsupportedModelError
from .linear_attention_seam import install_linear_attention_seam
from .routing import load_balancing_loss, record_expert_loads, router_sums
from .token_ids import check_token_ids


@dataclass
class TreeOutput(ModelOutput):
    """What a tree forward returns for a compact batch with `P` scored tokens.

    For a batch that starts from a boundary, log-probs, entropies and router logits of the prefix stand before its own:
    `P` and `C` count the known scores and rows.

    Attributes:
        loss (`[]`, fp32, *optional*): mean negative log-prob of the trained tokens of all trajectories, with the
            routers' auxiliary loss where the stock model adds it; only for the dict of [`DataCollatorWithPrefixTree`].
        log_probs (`[P]`, fp32): log-prob of each scored token.
        entropies (`[P]`, fp32, *optional*): entropy of the distribution that the scored token was drawn from, in nats.
        router_logits (tuple of `[C, E]`, *optional*): per MoE layer, when asked for.
        expert_loads (`[L, E]`, fp32, *optional*): expanded tokens that each expert of each MoE layer received.
    """

    loss: torch.Tensor | None = None
    log_probs: torch.Tensor = None  # pyright: ignore[reportAssignmentType]: always given; ModelOutput asks for a default
    entropies: torch.Tensor | None = None
    router_logits: tuple[torch.Tensor, ...] | None = None
    expert_loads: torch.Tensor | None = None


class TreeForward:
    """The instance's forward: a compact batch runs the tree, anything else what ran before."""

    def __init__(self, model: PreTrainedModel, family: Family, instance_forward):
        self.model = model
        self.family = family
        self.instance_forward = instance_forward  # set on the instance before, by a wrapper such as TRL's; or None
        self.implementations: dict[str, str] = {}  # keyword arguments of the layers: names of chosen implementations

    def choose(self, linear_attention: str | None, attention: str | None) -> None:
        """Use these implementations from now on; None leaves what was chosen before."""
        chosen = {"harts_linear_attention": linear_attention, "harts_attention": attention}
        self.implementations |= {keyword: name for keyword, name in chosen.items() if name is not None}

    def install_seams(self) -> None:
        """Wrap what the layers call.

        Repeated at each tree forward, at no cost: a pickled model may wake in a process whose modules are as upstream,
        and the attention implementation may change.
        """
        self.model.get_submodule(self.family.backbone)  # a causal LM without it is not what the table describes
        install_attention_seam(self.model.config.get_text_config()._attn_implementation)
        install_linear_attention_seam(self.family)

    @property
    def __signature__(self) -> inspect.Signature:
        """The original's, by which `generate` validates its arguments, with `completion_mask` added.

        `Trainer` drops columns that are not in the signature before the collator sees them.
        """
        signature = inspect.signature(self._original)
        parameters = [p for p in signature.parameters.values() if p.name != "completion_mask"]
        mask = inspect.Parameter("completion_mask", inspect.Parameter.KEYWORD_ONLY, default=None)
        has_kwargs = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
        parameters.insert(len(parameters) - has_kwargs, mask)
        return signature.replace(parameters=parameters)

    @property
    def _original(self):
        return self.instance_forward or type(self.model).forward.__get__(self.model)

    def __call__(self, *args, harts_batch: CompactBatch | None = None, **kwargs):
        if harts_batch is not None:
            with torch.cuda.device_of(harts_batch.token_ids):  # Triton launches on the current device
                return self._run(harts_batch, **kwargs)
        if "tree_input_ids" in kwargs:
            return self._run_features(kwargs, kwargs.get("num_items_in_batch"))
        return self._original(*args, **kwargs)

    def _run_features(self, features, num_items_in_batch) -> TreeOutput:
        batch = compact_batch_from_features(features, features["tree_input_ids"].device)
        config = self.model.config.get_text_config()
        check_token_ids(batch.tree, config)
        with_aux_loss = self.family.adds_aux_loss and config.output_router_logits
        output = self(harts_batch=batch, with_router_logits=with_aux_loss)
        # A scored token counts once per trajectory that trains it, as in the expanded batch.
        mask = features["labels"].cpu() != -100
        scores = torch.from_numpy(batch.all_scores())[mask]
        weights = torch.bincount(scores[scores >= 0], minlength=len(output.log_probs)).to(output.log_probs)
        items = weights.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        output.loss = -(output.log_probs * weights).sum() / items
        if with_aux_loss:
            assert output.router_logits is not None  # asked for above
            sums = router_sums(output.router_logits, batch.counts[None], config.num_experts_per_tok)
            output.loss = output.loss + config.router_aux_loss_coef * load_balancing_loss(sums, sums.detach())[0]
        return output

    def _run(
        self,
        batch: CompactBatch,
        temperature: float = 1.0,
        with_entropies: bool = True,
        with_router_logits: bool = False,
        head_in_fp32: bool = False,
        **unused,
    ) -> TreeOutput:
        given = [name for name, value in unused.items() if value is not None]
        if given:
            raise ValueError(f"a tree forward takes its inputs from the compact batch, not from {given}")
        if self.model.training:
            refuse_dropout(self.model)
        self.install_seams()
        backbone = self.model.get_submodule(self.family.backbone)
        if batch.starts_from is not None or batch.produces is not None:
            refuse_reentrant_checkpointing(backbone)
        # Tree attention reads the batch; the masks only keep the backbone from building its own.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.device)
        masks = {name: None if name == "linear_attention" else mask for name in self.family.layer_types}
        extra = {"output_router_logits": True} if with_router_logits else {}
        recomputes = backbone.is_activation_checkpointing and backbone.training
        is_producer = batch.produces is not None
        with (
            number_layers(backbone),
            recompute_final_norm(backbone) if recomputes and is_producer else contextlib.nullcontext(),
            record_expert_loads(backbone, self.family, batch.counts) as loads,
        ):
            output = backbone(
                input_ids=batch.token_ids[None],
                position_ids=batch.position_ids[None],
                attention_mask=masks or mask,
                use_cache=False,
                return_dict=True,
                harts_batch=batch,
                harts_safe_gate=self.family.has_safe_gate(self.model.config.get_text_config()),
                **self.implementations,
                harts_recomputes=recomputes,
                **extra,
            )
        hidden = output.last_hidden_state.squeeze(0)
        if batch.produces is not None:
            batch.produces.put(-1, "hidden", hidden[-1:])
        if batch.starts_from is not None:  # the prefix's last row predicts what continues it
            hidden = batch.starts_from.before(hidden, -1, "hidden", rows=1)
        hidden = hidden[batch.score_parents]
        no_autocast = torch.autocast(hidden.device.type, enabled=False) if head_in_fp32 else contextlib.nullcontext()
        with no_autocast:
            hidden = hidden.float() if head_in_fp32 else hidden
            log_probs, entropies = self._head(hidden, batch, temperature, with_entropies)
        # A node of their own behind all layers: hooks on outputs (FSDP) then fire before any layer runs backward.
        router_logits = [_Alias.apply(x) for x in output.router_logits] if with_router_logits else []
        return TreeOutput(
            log_probs=hand_over(batch, -1, "log_probs", log_probs),
            entropies=None if entropies is None else hand_over(batch, -1, "entropies", entropies),
            router_logits=tuple(hand_over(batch, k, "router_logits", x) for k, x in enumerate(router_logits)) or None,
            expert_loads=torch.stack(loads) if loads else None,
        )

    def _head(self, hidden: torch.Tensor, batch: CompactBatch, temperature: float, with_entropies: bool):
        """Log-probs and entropies of the scored tokens from the hidden states `[P, D]` that predict them."""
        head = self.model.get_output_embeddings()
        kinds = type(head).__mro__
        if any(k.__module__.startswith("peft.tuners") or k.__name__ == "TrainableTokensWrapper" for k in kinds):
            raise UnsupportedModelError(
                "an adapter on the output head is not supported: log-probs come from its weight, which the adapter "
                "does not change. Leave lm_head (and tied embeddings) out of target_modules and "
                "trainable_token_indices, or use modules_to_save."
            )
        weight, bias = head.weight, head.bias
        if isinstance(weight, DTensor):  # a unit of its own in FSDP2, whose hooks do not run here
            if torch.is_grad_enabled() and weight.requires_grad:
                raise UnsupportedModelError(
                    "the output head is sharded apart from what stands before it, so its gradient would miss other "
                    "ranks: shard it in one unit with the final norm, as Accelerate and Transformers do, or leave it "
                    "to the root"
                )
            weight = weight.full_tensor()
            bias = None if bias is None else bias.full_tensor()
        config = self.model.config.get_text_config()
        return linear_log_probs(
            hidden,
            weight,
            batch.score_targets,
            bias=bias,
            temperature=temperature,
            softcap=getattr(config, "final_logit_softcapping", None),
            with_entropy=with_entropies,
        )


class _Alias(torch.autograd.Function):
    """The same values in the same memory."""

    @staticmethod
    def forward(ctx, x):
        return x.detach()

    @staticmethod
    def backward(ctx, gradient):
        return gradient
