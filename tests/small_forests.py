"""Small sets of trajectories for brute force: seeded random ones, all tiny ones, and how a failure names its tree."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from forests import random_forest


def small_forest(seed: int, max_tokens: int = 14) -> list[list[int]]:
    """1 to 12 trajectories of fewer than `max_tokens` tokens over 1 to 3 token ids."""
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(3, 6))  # ids from 2 on
    return [s.tolist() for s in random_forest(rng, vocab, max_tokens, max_trajectories=12)]


def all_tiny_forests(max_tokens: int, max_trajectories: int) -> Iterator[list[list[int]]]:
    """Every multiset of binary trajectories up to these sizes, in an order that is not sorted."""
    trajectories = [list(s) for n in range(1, max_tokens + 1) for s in itertools.product((0, 1), repeat=n)]
    for n in range(1, max_trajectories + 1):
        for forest in itertools.combinations_with_replacement(trajectories, n):
            yield list(forest[::-1])


@contextmanager
def failures_name(seed, sequences, **settings) -> Iterator[None]:
    """An assertion that fails inside also says which seed, settings and trajectories it failed on."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, {settings}, trajectories {sequences}: {error}") from error
