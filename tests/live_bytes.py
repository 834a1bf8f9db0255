"""Bytes of the tensors that are alive, whoever holds them: autograd's graph, Python or a cache."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Watches every operation while it is active.

    A storage counts once that some operation read or made, however many tensors see a part of it.
    """

    def __init__(self):
        super().__init__()
        self._seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def count(self, model: torch.nn.Module) -> int:
        """Bytes that are alive now, apart from the model's parameters, their gradients and its buffers."""
        gradients = (p.grad for p in model.parameters() if p.grad is not None)
        others = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers(), *gradients)}
        return sum(size for at, (storage, size) in self._seen.items() if at not in others and not storage.expired())
