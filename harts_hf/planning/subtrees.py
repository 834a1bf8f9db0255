"""Subtrees of a sorted list of units, from the LCPs of neighbours alone: children of a fork, random divisions."""

from itertools import accumulate
from random import Random

MOST_SPLITS = 4  # a random division splits fewer subtrees than this below the first fork


def children(cuts: list[int], start: int, end: int) -> list[tuple[int, int]]:
    """The subtrees of a fork: spans of `start .. end - 1` between the least cuts inside.

    Args:
        cuts: LCP of each unit of the list with the one before it.
        start, end: at least two units.
    """
    fork = min(cuts[start + 1 : end])
    bounds = [start, *[k for k in range(start + 1, end) if cuts[k] == fork], end]
    return list(zip(bounds, bounds[1:], strict=False))


def random_pieces(cuts: list[int], most: int, random: Random) -> list[tuple[int, int]]:
    """Spans that divide the list into subtrees, in random order: the first fork's, some of them split further.

    Args:
        cuts: LCP of each unit of the list with the one before it; at least two units.
        most: most pieces; with more subtrees, neighbours stay together.
        random: source of the choices.
    """
    draw = random.random  # the other methods of `Random` take several times as long
    pieces = children(cuts, 0, len(cuts))
    for _ in range(int(draw() * MOST_SPLITS)):
        k = int(draw() * len(pieces))
        start, end = pieces[k]
        if end - start > 1:
            pieces[k : k + 1] = children(cuts, start, end)
    if len(pieces) > most:
        starts = [0, *sorted(random.sample([start for start, _ in pieces[1:]], most - 1))]
        pieces = list(zip(starts, [*starts[1:], len(cuts)], strict=True))
    pieces.sort(key=lambda _: draw())
    return pieces


def piece_sums(alone: list[int], shared: list[int], pieces: list[tuple[int, int]]) -> list[int]:
    """What the units of each piece come to together: the sum of what each is alone, less what neighbours share.

    Args:
        alone: of each unit of the list.
        shared: of each unit with the one before it; what the first unit of a piece shares is not taken off.
        pieces: spans of the list.
    """
    added = list(accumulate([a - s for a, s in zip(alone, shared, strict=True)], initial=0))
    return [added[end] - added[start] + shared[start] for start, end in pieces]


def random_order(cuts: list[int], random: Random) -> tuple[list[int], list[int]]:
    """A random depth-first order of the list's tree; each child of a fork stands before or after all later ones.

    Args:
        cuts: LCP of each unit of the list with the one before it; entry 0 is not read.
        random: source of the choices.

    Returns:
        Positions in the list, and each one's LCP with the one before it in this order; 0 for the first.
    """
    draw = random.random
    pending: list[tuple[int, list[int], list[int]]] = []  # LCP with the tree before, order, LCPs inside the order
    for k, cut in enumerate([*cuts[1:], -1]):
        tree, inside = [k], []
        # trees that stand deeper than the next unit's fork are complete
        while pending and pending[-1][0] > cut:
            across, left, left_inside = pending.pop()
            if draw() < 0.5:
                tree, inside = left + tree, [*left_inside, across, *inside]
            else:
                tree, inside = tree + left, [*inside, across, *left_inside]
        pending.append((cut, tree, inside))
    return pending[0][1], [0, *pending[0][2]]
