"""Samples of gradients, summed over backwards in fp32, and how near two of them are.

Two full sets of gradients of a model with billions of parameters do not fit beside it. Of a large parameter every 61st
element is kept: a prime, so that the sample goes through all rows, columns and experts.
"""

import functools

import torch

STRIDE = 61
LARGE = 2**20  # elements above which a parameter is sampled
GROUPS = ("attention", "linear attention", "experts", "shared and dense mlp", "router", "norms", "embeddings", "head")


class GradientSamples:
    """Context in which gradients of backwards are added up here, and dropped from the parameters.

    Attributes:
        sums (dict of `[n]`, fp32): by parameter name; on the host once the context has ended. A parameter that no
            backward reached is missing.
    """

    def __init__(self, model):
        self.sums: dict[str, torch.Tensor] = {}
        self._model = model
        self._handles = []

    def __enter__(self):
        for name, parameter in self._model.named_parameters():
            collect = functools.partial(self._collect, name)
            self._handles.append(parameter.register_post_accumulate_grad_hook(collect))
        return self

    def __exit__(self, *_):
        for handle in self._handles:
            handle.remove()
        self.sums = {name: total.cpu() for name, total in self.sums.items()}

    def _collect(self, name: str, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad.flatten(), None
        sample = gradient[:: STRIDE if len(gradient) > LARGE else 1].float()
        if name in self.sums:
            self.sums[name] += sample
        else:
            self.sums[name] = sample.clone()


def group_of(name: str, layer_types: list[str]) -> str:
    """One of `GROUPS`, of a `bailing_hybrid` parameter's name."""
    parts = name.split(".")
    if "lm_head" in parts:
        return "head"
    if "embed_tokens" in parts:
        return "embeddings"
    if "norm" in parts[-2]:
        return "norms"
    if parts[-3:-1] == ["mlp", "gate"]:
        return "router"
    if "mlp" in parts:
        return "experts" if "experts" in parts else "shared and dense mlp"
    layer = int(parts[parts.index("layers") + 1])
    return "attention" if layer_types[layer] == "full_attention" else "linear attention"


def compare_gradients(
    gradients: dict[str, torch.Tensor], others: dict[str, torch.Tensor], layer_types: list[str], device: torch.device
) -> dict[str, dict[str, float]]:
    """Per group: the cosine, and the norm of the difference over that of `others`. In fp64.

    Raises:
        ValueError: not the same parameters have gradients; the message names them.
    """
    if gradients.keys() != others.keys():
        raise ValueError(f"gradients on one side only: {sorted(gradients.keys() ^ others.keys())}")
    sums = {group: torch.zeros(4, dtype=torch.float64, device=device) for group in GROUPS}
    for name, gradient in gradients.items():
        a, b = (x.to(device).double() for x in (gradient, others[name]))
        sums[group_of(name, layer_types)] += torch.stack([a @ b, a @ a, b @ b, (a - b) @ (a - b)])
    results = {}
    for group, values in sums.items():
        product, own, other, difference = values.tolist()
        if other > 0:
            cosine = product / (own * other) ** 0.5 if own > 0 else 0.0
            results[group] = {"cosine": cosine, "relative_difference": (difference / other) ** 0.5}
    return results
