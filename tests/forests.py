"""Random and adversarial sets of trajectories for tests: every shape in which prefixes are shared."""

from collections.abc import Iterator

import numpy as np


def random_forest(
    rng: np.random.Generator, vocab: int, max_tokens: int = 200, max_trajectories: int = 8
) -> list[np.ndarray]:
    """Trajectories that fork from one another at random places; duplicates and nested prefixes happen."""
    sequences = [_ids(rng, int(rng.integers(1, max_tokens)), vocab)]
    for _ in range(int(rng.integers(0, max_trajectories))):
        parent = sequences[int(rng.integers(len(sequences)))]
        cut = int(rng.integers(0, len(parent) + 1))
        tail = _ids(rng, int(rng.integers(0, max(1, max_tokens - cut))), vocab)
        child = np.concatenate([parent[:cut], tail])
        sequences.append(child if len(child) else parent)
    rng.shuffle(sequences)
    return sequences


def shapes(rng: np.random.Generator, vocab: int) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Named shapes: chains, stars, caterpillars, nested prefixes, duplicates, one-token branches, chunk-edge forks."""
    trunk = _ids(rng, 140, vocab)
    yield "one token", [trunk[:1]]
    yield "one chain", [trunk]
    yield "deep chain with nested prefixes", [trunk[:n] for n in (1, 2, 63, 64, 65, 100, 127, 128, 129, 140)]
    yield "star", [np.concatenate([trunk[:70], _ids(rng, 20, vocab)]) for _ in range(6)]
    yield "caterpillar", [np.concatenate([trunk[:n], _ids(rng, 3, vocab)]) for n in range(5, 140, 13)] + [trunk]
    yield "duplicates", [trunk[:90], trunk[:90], trunk[:90], trunk[:64], trunk[:64]]
    yield "one-token branches", [np.append(trunk[:n], trunk[n] ^ 1) for n in range(58, 72)] + [trunk]
    for edge in (63, 64, 65, 127, 128, 129):
        yield f"fork at {edge}", [np.concatenate([trunk[:edge], _ids(rng, n, vocab)]) for n in (1, 2, 70)]
    yield "no sharing", [_ids(rng, n, vocab) for n in (1, 30, 64, 65)]
    yield (
        "two-level",
        [
            np.concatenate([trunk[:40], a, _ids(rng, 30, vocab)])
            for a in (_ids(rng, 30, vocab),) * 2 + (_ids(rng, 50, vocab),) * 2
        ],
    )


def _ids(rng: np.random.Generator, n: int, vocab: int) -> np.ndarray:
    return rng.integers(2, vocab, n)
