"""Alignment: cells of the grid that are empty get a microbatch, so that all replicas run equally many."""

from .draft import Bin, Draft

_Offer = tuple[int, int, list[int], list[int]]  # added work, work of the run, the run that moves, the rest that stays


def align(draft: Draft, for_free: bool = False) -> None:
    """Fill empty bins in place, each with the run that costs least to take from another bin.

    A bin is cut at its lowest valley; the smaller side moves. Runs that stay below the heaviest bin of the receiving
    slot come first, so that aligning lengthens no slot if it can be avoided, then the least added work. Bins stay
    empty only if no bin with two units can spare one, or none `for_free`, without adding work, if that is asked for.
    """
    givers = [b for b in draft.bins if len(b.members) > 1]
    # by giver, the taker's window and whether it produces
    offers: dict[tuple[Bin, int | None, bool], list[_Offer]] = {}
    for empty in [b for b in draft.bins if not b.members]:
        heaviest = max(b.work for b in draft.bins if b.slot == empty.slot)
        best = None
        for b in givers:
            key = (b, empty.window, empty.produces)
            if key not in offers:
                offers[key] = _offers(draft, b, empty)
            for added, work, run, rest in offers[key]:
                choice = (work > heaviest, added, work, run, rest, b)
                if for_free and added > 0:
                    continue
                if best is None or choice[:4] < best[:4]:
                    best = choice
        if best is None:
            return
        *_, run, rest, b = best
        for changed, members in ((b, rest), (empty, run)):
            changed.members = members
            changed.rows, changed.work = draft.charge(members, changed.window, changed.produces)
        offers = {key: offer for key, offer in offers.items() if key[0] is not b}
        givers = [b for b in draft.bins if len(b.members) > 1]


def _offers(draft: Draft, b: Bin, empty: Bin) -> list[_Offer]:
    """What a bin can give to an empty one within its limit."""
    offers = []
    for run, rest in _sides(draft, b):
        if draft.may_hold(b, rest) and draft.may_hold(empty, run):
            rows, work = draft.charge(run, empty.window, empty.produces)
            if rows <= draft.max_rows:
                added = work + draft.charge(rest, b.window, b.produces)[1] - b.work
                offers.append((added, work, run, rest))
    return offers


def _sides(draft: Draft, b: Bin) -> list[tuple[list[int], list[int]]]:
    """Both ways to part a bin at its lowest valley: (run that moves, rest that stays)."""
    lcp = draft.units.lcp
    members = b.members
    middle = min(range(1, len(members)), key=lambda k: lcp(members[k - 1], members[k]))
    left, right = members[:middle], members[middle:]
    return [(left, right), (right, left)]
