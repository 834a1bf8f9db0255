"""How far two sets of final hidden states lie apart, in full-vocabulary distributions, a few tokens at a time."""

import torch

LOGITS = 2**27  # of one side, at once: 0.5 GB in fp32


def compare_distributions(
    hidden: torch.Tensor, other: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> dict[str, float]:
    """Statistics over tokens of next-token distributions. Logits are fp32 products, on both sides alike.

    Args:
        hidden, other: `[T, D]`, the states of two runs, anywhere.
        weight: `[vocab, D]`, fp32, of the head, on the device that computes.
        targets: `[T]`, int64, the next tokens.

    Returns:
        `symmetric_kl_mean`, `symmetric_kl_max`: half the sum of both directions, in nats;
        `nll_difference_mean`, `nll_difference_max`: |difference| of the targets' negative log-likelihoods, in nats;
        `cosine_mean`, `cosine_min`: of the logits, 1 where both are 0;
        `equal_states`: share of tokens whose states are equal in every bit.
    """
    device = weight.device
    size = max(1, LOGITS // len(weight))
    kl, nll, cosine, equal = [], [], [], []
    for at in torch.arange(len(hidden)).split(size):
        a, b = (x[at].to(device) for x in (hidden, other))
        equal.append((a == b).all(dim=-1))
        logits = [x.float() @ weight.t() for x in (a, b)]
        units = [x / x.norm(dim=-1, keepdim=True).clamp(min=1e-30) for x in logits]  # 0 for a padding id alone
        cosine.append(1 - (units[0] - units[1]).square().sum(dim=-1).double() / 2)  # no cancellation near 1
        del units
        a, b = (x.log_softmax(dim=-1) for x in logits)
        del logits
        nll.append((a - b).gather(1, targets[at].to(device)[:, None])[:, 0].abs())
        kl.append(((a.exp() - b.exp()) * (a - b)).sum(dim=-1) / 2)
    kl, nll, cosine = (torch.cat(x).double() for x in (kl, nll, cosine))
    return {
        "symmetric_kl_mean": kl.mean().item(),
        "symmetric_kl_max": kl.max().item(),
        "nll_difference_mean": nll.mean().item(),
        "nll_difference_max": nll.max().item(),
        "cosine_mean": cosine.mean().item(),
        "cosine_min": cosine.min().item(),
        "equal_states": torch.cat(equal).double().mean().item(),
    }


def compare_experts(experts: torch.Tensor, other: torch.Tensor) -> dict[str, float]:
    """How often tokens chose other experts.

    Args:
        experts, other: `[T, L, k]`, sorted.

    Returns:
        `tokens_with_other_experts`: share of tokens that chose another set in some layer;
        `other_choices`: share of (token, layer) pairs that did.
    """
    differs = (experts != other).any(dim=-1)
    return {
        "tokens_with_other_experts": differs.any(dim=-1).double().mean().item(),
        "other_choices": differs.double().mean().item(),
    }
