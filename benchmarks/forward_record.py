"""What a forward leaves to be compared: final hidden states and the experts that each token chose.

Taken by hooks, in the same way from a stock model and from a tree forward.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from harts_hf.models.causal_lm import causal_lm_of
from harts_hf.models.families import family_of
from harts_hf.models.routing import watch_routers


@dataclass(eq=False)
class ForwardRecord:
    """The last forward that ran.

    Attributes:
        hidden (`[T, D]`): states behind the final norm, in the model's dtype, with their graph; the tokens of all
            batch entries one after another.
        choices (list of `[T, k]`, int64): chosen experts, per layer that has some.
    """

    hidden: torch.Tensor | None = None
    choices: list[torch.Tensor] = field(default_factory=list)

    @property
    def experts(self) -> torch.Tensor:
        """`[T, L, k]`, int16: each token's experts in each layer, in increasing order."""
        return torch.stack(self.choices, dim=1).sort(dim=-1).values.to(torch.int16)


@contextlib.contextmanager
def record_forwards(model) -> Iterator[ForwardRecord]:
    """Keep a record of each forward, the last one's, until the context ends.

    A backward with recomputation belongs outside: it runs the routers again.

    Args:
        model: a supported mixture of experts, with or without a tree forward.
    """
    base = causal_lm_of(model)
    family = family_of(base)
    backbone = base.get_submodule(family.backbone)
    record = ForwardRecord()

    def begin(_module, _args):
        record.choices.clear()

    def end(_module, _args, output):
        record.hidden = output.last_hidden_state.flatten(0, 1)

    def choose(_module, _args, output):
        record.choices.append(output[2])

    handles = [backbone.register_forward_pre_hook(begin), backbone.register_forward_hook(end)]
    try:
        with watch_routers(backbone, family, choose):
            yield record
    finally:
        for handle in handles:
            handle.remove()
