"""Subtrees of a sorted list of units, from the LCPs of neighbours alone: children of a fork, random divisions."""

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
    pieces = children(cuts, 0, len(cuts))
    for _ in range(random.randrange(MOST_SPLITS)):
        k = random.randrange(len(pieces))
        start, end = pieces[k]
        if end - start > 1:
            pieces[k : k + 1] = children(cuts, start, end)
    if len(pieces) > most:
        starts = [0, *sorted(random.sample([start for start, _ in pieces[1:]], most - 1))]
        pieces = list(zip(starts, [*starts[1:], len(cuts)], strict=True))
    random.shuffle(pieces)
    return pieces
