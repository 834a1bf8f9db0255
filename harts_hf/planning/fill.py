"""Filling: the pieces that together come closest to a target, an exact subset sum on the bits of one integer."""

RESOLUTION = 1 << 15  # targets above this are counted in larger grains, so that a filling costs the same at any budget


def fill(sizes: list[int], target: int) -> list[int]:
    """Indices, increasing, of pieces whose sum is the largest that does not exceed the target.

    Exact up to a target of `RESOLUTION`; above, sizes are rounded up to multiples of `target / RESOLUTION`. Among
    equal sums the later pieces stay out. Cost: pieces times `RESOLUTION` bits.

    Args:
        sizes: positive sizes of the pieces.
        target: most that the chosen sizes sum to.
    """
    if target <= 0:
        return []
    grain = -(-target // RESOLUTION)
    target //= grain
    sizes = [-(-size // grain) for size in sizes]
    inside = (2 << target) - 1
    reached = [1]  # bit s: some of the pieces so far sum to s
    for size in sizes:
        before = reached[-1]
        reached.append(before | (before << size & inside) if size <= target else before)
    left = reached[-1].bit_length() - 1
    chosen = []
    for k in reversed(range(len(sizes))):
        if left == 0:
            break
        if not reached[k] >> left & 1:
            chosen.append(k)
            left -= sizes[k]
    return chosen[::-1]
