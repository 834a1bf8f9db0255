"""Boundary: what a sharing window's producer hands to its consumers, and the gradients that come back.

While the producer runs, its layers put tensors here; consumers read them as leaves, so that a consumer's backward ends
there and the producer runs backward once, after the last consumer. Gradients of all consumers add up in fp32. A window
inside another one has a boundary with a parent: a consumer reads through to the rows of the windows around it.
"""

import functools
from collections.abc import Iterator

import torch

Key = tuple[int, str]  # layer, -1 behind the last one; what is handed over


class Boundary:
    """Tensors of one window's producer, by layer and name.

    Args:
        tokens (`int`): length of the window's prefix, from the trajectory's start.
        parent (`Boundary`, *optional*): of the window around it.
        is_detached (`bool`): consumers get leaves, and [`Boundary.hand_back`] gives their gradients to the producer.
            Otherwise they get the producer's own tensors, and one backward serves all.

    Attributes:
        tokens, parent: as given.
        start (`int`): prefix of the parent, in tokens; the producer's rows are those from `start` to `tokens`.
    """

    def __init__(self, tokens: int, parent: "Boundary | None" = None, is_detached: bool = True):
        self.tokens = tokens
        self.parent = parent
        self.start = 0 if parent is None else parent.tokens
        self._is_detached = is_detached
        self._is_open = True
        self._tensors: dict[Key, torch.Tensor] = {}  # of the producer, where they carry its graph
        self._given: dict[Key, torch.Tensor] = {}
        self._gradients: dict[Key, torch.Tensor] = {}

    def put(self, layer: int, name: str, tensor: torch.Tensor) -> None:
        """Hand over a tensor. Does nothing once closed: a recomputation of the producer puts the same again."""
        if not self._is_open:
            return
        if tensor.untyped_storage().nbytes() > tensor.nbytes:  # a view would keep all of what it looks at alive
            tensor = tensor.clone()
        key = layer, name
        if not self._is_detached or not tensor.requires_grad:
            self._given[key] = tensor
            return
        self._tensors[key] = tensor
        leaf = tensor.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(functools.partial(_collect, self._gradients, key))
        self._given[key] = leaf

    def close(self) -> None:
        """The producer's forward is over."""
        self._is_open = False

    def nearest(self, layer: int, name: str) -> torch.Tensor | None:
        """The tensor of this window, or of the nearest one around it that handed it over."""
        for boundary in self._inner_first():
            if (layer, name) in boundary._given:
                return boundary._given[layer, name]
        return None

    def before(self, own: torch.Tensor, layer: int, name: str, dim: int = 0, rows: int | None = None) -> torch.Tensor:
        """What all windows handed over, outermost first, and then `own`, joined along `dim`.

        Args:
            own: follows the prefix's rows.
            rows: only so many of the last rows of the prefix.
        """
        parts = [own]
        for boundary in self._inner_first():
            if rows == 0:
                break
            part = boundary._given[layer, name]
            if rows is not None:
                part = part.narrow(dim, max(0, part.shape[dim] - rows), min(rows, part.shape[dim]))
                rows -= part.shape[dim]
            parts.insert(0, part)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)

    def hand_back(self) -> torch.Tensor | None:
        """Free the leaves; a scalar 0 whose backward is the producer's, from the gradients that consumers left.

        Any engine that calls backward on it runs the producer's backward without knowing of boundaries. `None` if no
        consumer left a gradient.
        """
        tensors, gradients = self._tensors, self._gradients
        self.free()
        keys = [key for key in tensors if key in gradients]
        if not keys:
            return None
        return _HandBack.apply([gradients.pop(key) for key in keys], *(tensors[key] for key in keys))

    def free(self) -> None:
        """Forget all tensors. The boundary cannot be read any more."""
        self._is_open = False
        self._tensors, self._given, self._gradients = {}, {}, {}

    def _inner_first(self) -> Iterator["Boundary"]:
        boundary: Boundary | None = self
        while boundary is not None:
            yield boundary
            boundary = boundary.parent


def _collect(gradients: dict[Key, torch.Tensor], key: Key, leaf: torch.Tensor) -> None:
    """Move a leaf's gradient to the sum over consumers, in fp32 (fp64 for fp64)."""
    gradient, leaf.grad = leaf.grad, None
    if gradient is None:  # the engine reached the leaf with no gradient: an output that the loss does not read
        return
    if key in gradients:
        gradients[key] += gradient
    else:
        gradients[key] = gradient.to(torch.promote_types(gradient.dtype, torch.float32), copy=True)


class _HandBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gradients: list[torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        ctx.dtypes = [tensor.dtype for tensor in tensors]
        return torch.zeros((), device=tensors[0].device)

    @staticmethod
    def backward(ctx, _):
        gradients, ctx.gradients = ctx.gradients, None
        return None, *(gradient.to(dtype) for gradient, dtype in zip(gradients, ctx.dtypes, strict=True))
