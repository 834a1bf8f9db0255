"""Ranks: the processes that work on one optimizer step, and tensors of any length between them."""

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

_HEADER_DTYPE = torch.int64


class Ranks:
    """The processes of the default process group, or this one alone.

    All methods are collective: every rank calls them in the same order. Tensors live on `device`, so that the
    backend of that device (gloo, NCCL) moves them.

    Args:
        device: where this process computes.
        alone (`bool`): this process works by itself, whatever others there are. Nothing is communicated.

    Attributes:
        rank (`int`): number of this process among them.
        size (`int`): how many there are.
        device: as given.
        received_bytes (`int`): payload that this process has received so far, without padding.
        seconds (`float`): host time of all calls so far; on a GPU sends may still be under way when a call returns.
    """

    def __init__(self, device: torch.device, alone: bool = False):
        together = not alone and dist.is_initialized()
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1
        self.device = device
        self.received_bytes = 0
        self.seconds = 0.0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The 1-D tensors of all ranks, in their order, on the host. Lengths may differ, dtypes may not."""
        if self.size == 1:
            return [tensor.cpu()]
        start = time.perf_counter()
        own = torch.tensor([len(tensor)], dtype=_HEADER_DTYPE, device=self.device)
        lengths = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(lengths, own)
        sizes = torch.cat(lengths).tolist()
        padded = tensor.new_zeros(max(sizes), device=self.device)
        padded[: len(tensor)] = tensor.to(self.device)
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        if max(sizes):
            dist.all_gather(parts, padded)
        self.received_bytes += (sum(sizes) - len(tensor)) * tensor.itemsize
        gathered = [part[:size].cpu() for part, size in zip(parts, sizes, strict=True)]
        self.seconds += time.perf_counter() - start
        return gathered

    def gather_objects(self, value: Any) -> list:
        """The small picklable values of all ranks, in their order."""
        if self.size == 1:
            return [value]
        start = time.perf_counter()
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        self.seconds += time.perf_counter() - start
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, a new tensor on every rank."""
        total = tensor.to(self.device, copy=True)
        if self.size > 1:
            start = time.perf_counter()
            dist.all_reduce(total)
            self.seconds += time.perf_counter() - start
        return total

    def send(self, outgoing: Sequence[tuple[int, torch.Tensor]], incoming: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Send tensors to other ranks and fill buffers with theirs. A tensor may go to several ranks without a copy.

        Args:
            outgoing: (rank, contiguous tensor).
            incoming: (rank, contiguous buffer). What one rank sends to another arrives in the order of its `outgoing`,
                with equal sizes. Empty tensors are left out on both sides.
        """
        start = time.perf_counter()
        operations = [dist.P2POp(dist.irecv, buffer, rank) for rank, buffer in incoming if buffer.numel()]
        operations += [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in outgoing if tensor.numel()]
        if operations:
            for request in dist.batch_isend_irecv(operations):
                request.wait()
        self.received_bytes += sum(buffer.nbytes for _, buffer in incoming)
        self.seconds += time.perf_counter() - start
