"""The trajectories of all ranks, planned as one step: who runs which, and what travels for it.

A trajectory's home is the rank whose batch it came in. The plan may put it anywhere, so token ids go to all ranks; the
rank that runs it, its executor, gets the whole stock micro-batch, because losses normalise over it; what becomes known
of its tokens goes home, where TRL's loss reports.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from harts_hf.distributed.ranks import Ranks
from harts_hf.distributed.tensor_bytes import layout_of, num_bytes, pack, unpack
from harts_hf.planning.plan import Microbatch, StepPlan
from harts_hf.planning.program import plan_program

from .micro_batches import PlacedTrajectory

Shape = tuple[int, int]  # of a stock micro-batch's completions, [B, T]


@dataclass(frozen=True, eq=False)
class SharedTrajectories:
    """The trajectories of all ranks, in the order of ranks, and the stock micro-batches they belong to.

    Attributes:
        trajectories: `micro_batch` counts over all ranks.
        homes (list of `int`): rank of each micro-batch.
        shapes (list of `(B, T)`): of each micro-batch's completions.
    """

    trajectories: list[PlacedTrajectory]
    homes: list[int]
    shapes: list[Shape]


def share_trajectories(
    ranks: Ranks, placed: Sequence[PlacedTrajectory], shapes: Sequence[Shape]
) -> SharedTrajectories:
    """Give every rank the token ids and masks of all. Collective.

    A token travels as 4 bytes, the mask in its lowest bit. An id that does not fit becomes the nearest that does: no
    vocabulary has that one either, so all ranks refuse it.

    Args:
        placed: this rank's trajectories; `micro_batch` counts its own micro-batches.
        shapes: of this rank's micro-batches.
    """
    if ranks.size == 1:
        return SharedTrajectories(list(placed), [0] * len(shapes), list(shapes))
    header = [len(placed), len(shapes), *(n for shape in shapes for n in shape)]
    header += [n for t in placed for n in (len(t.token_ids), t.micro_batch, t.row, t.first_column)]
    ids = [t.token_ids.clip(-(2**30), 2**30 - 1).astype(np.int32) * 2 + t.scored for t in placed]
    ids = ids or [np.zeros(0, np.int32)]
    headers = ranks.gather(torch.tensor(header))
    tokens = ranks.gather(torch.from_numpy(np.concatenate(ids).astype(np.int32)))
    trajectories: list[PlacedTrajectory] = []
    homes: list[int] = []
    all_shapes: list[Shape] = []
    for rank, (head, flat) in enumerate(zip(headers, tokens, strict=True)):
        first = len(homes)
        num_placed, num_micro_batches, *numbers = head.tolist()
        all_shapes += [(numbers[2 * m], numbers[2 * m + 1]) for m in range(num_micro_batches)]
        homes += [rank] * num_micro_batches
        ids, scored = flat.numpy().astype(np.int64) >> 1, (flat.numpy() & 1).astype(bool)
        places = np.array(numbers[2 * num_micro_batches :], dtype=np.int64).reshape(num_placed, 4).tolist()
        start = 0
        for length, micro_batch, row, first_column in places:
            part = slice(start, start + length)
            trajectories.append(PlacedTrajectory(ids[part], scored[part], first + micro_batch, row, first_column))
            start += length
    return SharedTrajectories(trajectories, homes, all_shapes)


class PlannedStep:
    """A plan of several ranks' trajectories and the transfers that it needs.

    Making one, `share_micro_batches` and `send_home` are collective.

    Args:
        ranks: who takes part; rank `r` runs the plan's replica `r`.
        shared: what [`share_trajectories`] returned, or a part of its trajectories.
        plan: of these trajectories, for as many replicas as ranks.
        in_lockstep (`bool`): ranks meet within each forward and backward (FSDP), so all run one common program.

    Attributes:
        ranks, plan: as given.
        own_plan ([`StepPlan`]): what this rank runs.
        program (tuple of [`Operation`], or `None`): in which order, with fillers; `None` for the own plan's order.
        trajectories: as given; the plans' indices count them.
        num_micro_batches (`int`): stock micro-batches of all ranks.
        own_micro_batches (`list[int]`): of this rank, by their number among all.
        shapes (`dict[int, (B, T)]`): of the micro-batches that are this rank's home or that it runs a part of.

    Raises:
        RuntimeError: ranks hold different plans.
    """

    def __init__(self, ranks: Ranks, shared: SharedTrajectories, plan: StepPlan, in_lockstep: bool = False):
        self.ranks = ranks
        self.plan = plan
        self.own_plan = plan.of_replica(ranks.rank)
        self.program = plan_program(plan, ranks.rank) if in_lockstep else None
        self.trajectories = shared.trajectories
        self.num_micro_batches = len(shared.homes)
        self._homes = shared.homes
        self.own_micro_batches = [g for g, home in enumerate(self._homes) if home == ranks.rank]
        self._refuse_different_plans()
        executors = [set[int]() for _ in self._homes]  # of each micro-batch
        # (executor, home) -> micro-batch -> trajectories
        self._moved: dict[tuple[int, int], dict[int, list[int]]] = {}
        for slot in plan.slots:
            for executor, microbatch in enumerate(slot):
                for i in () if microbatch is None else microbatch.trajectories:
                    g = self.trajectories[i].micro_batch
                    executors[g].add(executor)
                    if executor != self._homes[g] and ranks.rank in (executor, self._homes[g]):
                        self._moved.setdefault((executor, self._homes[g]), {}).setdefault(g, []).append(i)
        self._visitors = [sorted(found - {home}) for found, home in zip(executors, self._homes, strict=True)]
        held = [g for g, home in enumerate(self._homes) if ranks.rank == home or ranks.rank in self._visitors[g]]
        self.shapes = {g: shared.shapes[g] for g in held}

    def trajectories_of(self, microbatch: Microbatch) -> list[PlacedTrajectory]:
        """The trajectories of a microbatch of the plan, in its order."""
        return [self.trajectories[i] for i in microbatch.trajectories]

    def share_micro_batches(self, own: Sequence[dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Send each micro-batch to the ranks that run a part of it.

        Args:
            own: values of this rank's micro-batches; tensors, or small picklable values.

        Returns:
            number among all -> values, of the micro-batches that `shapes` holds. Those of other ranks are copies.
        """
        held = dict(zip(self.own_micro_batches, own, strict=True))
        if self.ranks.size == 1:
            return held
        layouts = sum(self.ranks.gather_objects([layout_of(values) for values in own]), [])
        outgoing = []
        for g, values in held.items():
            if self._visitors[g]:
                packed = pack(values, self.ranks.device)
                outgoing += [(rank, packed) for rank in self._visitors[g]]
        buffers = {
            g: torch.empty(num_bytes(layouts[g]), dtype=torch.uint8, device=self.ranks.device)
            for g in self.shapes
            if g not in held
        }
        self.ranks.send(outgoing, [(self._homes[g], buffer) for g, buffer in buffers.items()])
        received = {g: unpack(layouts[g], buffer) for g, buffer in buffers.items()}
        return {g: held[g] if g in held else received[g] for g in self.shapes}

    def send_home(
        self,
        num_values: int,
        read: Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor],
        write: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], None],
    ) -> None:
        """Send what is known of the scored tokens of trajectories that ran elsewhere to their homes.

        Args:
            num_values: values per token.
            read: (micro-batch, rows, columns) -> fp32 `[num_values, n]` at these places of its completions.
            write: the same places, and the values that go there.
        """
        outgoing, incoming, places = [], [], []
        for (executor, home), parts in sorted(self._moved.items()):
            indices = [(g, *self._tokens(parts[g])) for g in sorted(parts)]
            if executor == self.ranks.rank:
                values = [read(g, rows, columns) for g, rows, columns in indices]
                outgoing.append((home, torch.cat(values, dim=1).contiguous()))
            else:
                total = sum(len(rows) for _, rows, _ in indices)
                incoming.append((executor, torch.empty(num_values, total, device=self.ranks.device)))
                places.append(indices)
        self.ranks.send(outgoing, incoming)
        for indices, (_, buffer) in zip(places, incoming, strict=True):
            parts = buffer.split([len(rows) for _, rows, _ in indices], dim=1)
            for (g, rows, columns), values in zip(indices, parts, strict=True):
                write(g, rows, columns, values)

    def _tokens(self, trajectories: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows and columns of the scored tokens of trajectories of one micro-batch: `[n]`, int64."""
        chosen = [self.trajectories[i] for i in trajectories]
        columns = [t.scored_columns for t in chosen]
        rows = np.repeat([t.row for t in chosen], [len(c) for c in columns])
        device = self.ranks.device
        return torch.from_numpy(rows).to(device), torch.from_numpy(np.concatenate(columns)).to(device)

    def _refuse_different_plans(self) -> None:
        digest = hashlib.blake2b(repr(self.plan).encode(), digest_size=7).digest()
        digests = torch.cat(self.ranks.gather(torch.tensor([int.from_bytes(digest, "big")])))
        if (digests != digests[0]).any():
            raise RuntimeError(
                f"ranks planned the same trajectories differently (rank {self.ranks.rank}: {digest.hex()}): give all "
                "of them the same options and the same versions of numpy and harts_hf, or set "
                "exchange_trajectories=False"
            )
