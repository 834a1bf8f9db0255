"""The order in which finished trajectories are trained: groups stay together, so that they share their prefixes."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch.utils.data import Sampler


class GroupedTrajectorySampler(Sampler):
    """Each trajectory once an epoch, the trajectories of a group side by side, in blocks that repeat.

    TRL pulls one batch per micro-step and uses one of every `repeat`, so each block comes `repeat` times in a row. The
    order depends on the seed and the epoch alone, so that a resumed run sees what an uninterrupted one would.

    Args:
        groups: group of each trajectory.
        block (`int`): trajectories per generation batch, over all ranks.
        repeat (`int`): how often each block comes.
        shuffle (`bool`): shuffle the groups, anew each epoch; False keeps them in order of first appearance.
        seed (`int`): seed of the shuffling.

    Raises:
        ValueError: fewer trajectories than a block.
    """

    def __init__(self, groups: list, block: int, repeat: int, shuffle: bool, seed: int):
        if len(groups) < block:
            raise ValueError(
                f"the dataset has {len(groups)} trajectories, fewer than one optimizer step's batch of {block} "
                "(per_device_train_batch_size x gradient_accumulation_steps x processes)"
            )
        left_out = len(groups) % block
        if left_out:
            warnings.warn(
                f"{left_out} of {len(groups)} trajectories do not fill a last batch of {block} and are left out of "
                f"each epoch: {'other ones each time' if shuffle else 'always the same, since shuffle_dataset=False'}",
                stacklevel=2,
            )
        members: dict[Any, list[int]] = {}
        for i, group in enumerate(groups):
            members.setdefault(group, []).append(i)
        self._groups = [np.array(m) for m in members.values()]
        self._num_blocks = len(groups) // block
        self._block, self._repeat, self._shuffle, self._seed = block, repeat, shuffle, seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose order the next iteration takes."""
        self._epoch = epoch

    def __len__(self) -> int:
        return self._num_blocks * self._block * self._repeat

    def __iter__(self) -> Iterator[int]:
        order = np.arange(len(self._groups))
        if self._shuffle:
            order = np.random.default_rng((self._seed, self._epoch)).permutation(order)
        indices = np.concatenate([self._groups[g] for g in order])
        for start in range(0, self._num_blocks * self._block, self._block):
            for _ in range(self._repeat):
                yield from indices[start : start + self._block].tolist()
