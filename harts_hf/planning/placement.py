"""Placement of microbatches on slots and replicas: microbatches of similar work share a slot."""

from .draft import Bin


def place(bins: list[Bin], num_replicas: int) -> None:
    """Set slot and replica of each bin from its work; none of the bins is in a window.

    Bins sorted by work and cut into slots minimise the sum of the slots' heaviest bins for the given bins. Within a
    slot the heaviest goes to the replica with the least work so far, so that cumulative work stays even.
    """
    order = sorted(bins, key=lambda b: (-b.work, b.members))
    replica_work = [0] * num_replicas
    for first in range(0, len(order), num_replicas):
        free = sorted(range(num_replicas), key=lambda r: (replica_work[r], r))
        for b, replica in zip(order[first : first + num_replicas], free, strict=False):
            b.slot = first // num_replicas
            b.replica = replica
            replica_work[replica] += b.work
