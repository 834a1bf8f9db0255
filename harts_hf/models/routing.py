"""Mixture-of-experts statistics of a compact batch, in which each row is routed once.

A row weighs as many tokens as it stands for.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from .families import Family, UnsupportedModelError, family_of


@dataclass(frozen=True, eq=False)
class RouterSums:
    """Sums over rows and layers from which a load-balancing loss follows, per group of trajectories.

    A group (one of the micro-batches that the stock trainer would run) weighs a row by how many of its trajectories
    pass through it. Sums of several compact batches add up.

    Attributes:
        assignments (`[M, E]`, fp32): weighted rows that chose each expert; no gradient.
        probs (`[M, E]`, fp32): weighted sum of the router's softmax probabilities; carries the gradient.
        tokens (`[M]`, fp32): weighted rows times layers.
    """

    assignments: torch.Tensor
    probs: torch.Tensor
    tokens: torch.Tensor

    def __add__(self, other: "RouterSums") -> "RouterSums":
        return RouterSums(self.assignments + other.assignments, self.probs + other.probs, self.tokens + other.tokens)

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "RouterSums":
        """`function` of each of the three."""
        return RouterSums(function(self.assignments), function(self.probs), function(self.tokens))

    def detach(self) -> "RouterSums":
        """The same sums without their graph."""
        return RouterSums(self.assignments, self.probs.detach(), self.tokens)


def router_sums(router_logits: tuple[torch.Tensor, ...], weights: torch.Tensor, top_k: int) -> RouterSums:
    """Sums for the load-balancing loss of Transformers' MoE models (`load_balancing_loss_func`).

    Args:
        router_logits (tuple of `[C, E]`): one tensor per MoE layer.
        weights (`[M, C]`, fp32): how many trajectories of each group pass through each row.
        top_k (`int`): experts per token.

    Returns:
        [`RouterSums`] of `M` groups; the gradient of `probs` reaches `router_logits`.
    """
    num_experts = router_logits[0].shape[-1]
    assignments = weights.new_zeros(len(weights), num_experts)
    probs = weights.new_zeros(len(weights), num_experts)
    for logits in router_logits:
        routing = torch.softmax(logits, dim=-1)
        chosen = routing.detach().topk(top_k, dim=-1).indices  # [C, top_k]
        one_hot = torch.zeros_like(routing, dtype=torch.float32).scatter_(1, chosen, 1.0)
        assignments = assignments + weights @ one_hot
        probs = probs + weights @ routing.float()
    return RouterSums(assignments, probs, weights.sum(dim=1) * len(router_logits))


def load_balancing_loss(sums: RouterSums, totals: RouterSums) -> torch.Tensor:
    """Each group's load-balancing loss, or one compact batch's share in it.

    `E * sum_e f_e P_e`, with `f` the share of tokens that chose expert `e` and `P` the mean probability. `f` has no
    gradient, so the loss is linear in `probs`: the shares of the compact batches that hold a group add up to its loss.

    Args:
        sums: of the compact batch at hand.
        totals: of all compact batches of the step.

    Returns:
        `[M]`, fp32.
    """
    tokens = totals.tokens.clamp(min=1.0)[:, None]
    return (totals.assignments / tokens * sums.probs / tokens).sum(dim=1) * sums.probs.shape[1]


@contextlib.contextmanager
def record_expert_loads(
    backbone: torch.nn.Module, family: Family, counts: torch.Tensor
) -> Iterator[list[torch.Tensor]]:
    """Collect, during one forward, how many expanded tokens each expert of each layer receives.

    Hooks are removed at the end, so a recomputation in the backward pass is not counted again.

    Args:
        backbone: the text decoder.
        family: the model's family; one without a router leaves the list empty.
        counts (`[C]`, fp32): trajectories per row; padding rows weigh 0.

    Yields:
        a list that fills with one `[E]` fp32 tensor per MoE layer.
    """
    loads: list[torch.Tensor] = []

    def record(router, _args, output):
        logits, _, chosen = output
        load = counts.new_zeros(logits.shape[-1])
        loads.append(load.index_add_(0, chosen.reshape(-1), counts.repeat_interleave(chosen.shape[-1])))

    with watch_routers(backbone, family, record):
        yield loads


@contextlib.contextmanager
def watch_routers(backbone: torch.nn.Module, family: Family, hook: Callable) -> Iterator[None]:
    """Call `hook` (router, arguments, output) after each router's forward, until the context ends.

    Args:
        backbone: the text decoder; its modules of class `family.router_class` are watched.
        family: the model's family; one without a router has none to watch.
        hook: a forward hook; the output is (logits `[C, E]`, weights, chosen experts `[C, k]`).
    """
    handles = []
    if family.router_class is not None:
        for module in backbone.modules():
            if type(module).__name__ == family.router_class:
                handles.append(module.register_forward_hook(hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def expert_biases(model) -> list[torch.Tensor]:
    """The buffers `[E]` that a causal LM's routers add to their scores to choose experts, one per MoE layer.

    Raises:
        UnsupportedModelError: the model has no router, or its routers have no such bias.
    """
    name = family_of(model).router_class
    routers = [module for module in model.modules() if type(module).__name__ == name]
    biases = [router.e_score_correction_bias for router in routers if "e_score_correction_bias" in router._buffers]
    if not routers or len(biases) < len(routers):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no router with a correction bias (e_score_correction_bias): its experts are "
            "balanced by an auxiliary loss, if at all"
        )
    return biases
