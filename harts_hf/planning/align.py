"""Alignment: cells of the grid that are empty get a microbatch, so that all replicas run equally many."""

from .draft import Bin, Draft


def align(draft: Draft, for_free: bool = False) -> None:
    """Fill empty bins in place, each with the run that costs least to take from another bin.

    A bin is cut at its lowest valley; the smaller side moves. Runs that stay below the heaviest bin of the receiving
    slot come first, so that aligning lengthens no slot if it can be avoided, then the least added work. Bins stay
    empty only if no bin with two units can spare one, or none `for_free`, without adding work, if that is asked for.
    """
    for empty in [b for b in draft.bins if not b.members]:
        heaviest = max(b.work for b in draft.bins if b.slot == empty.slot)
        best = None
        for b in draft.bins:
            if len(b.members) < 2:
                continue
            for run, rest in _sides(draft, b):
                if not draft.may_hold(b, rest) or not draft.may_hold(empty, run):
                    continue
                rows, work = draft.charge(run, empty.window, empty.produces)
                if rows > draft.max_rows:
                    continue
                rest_work = draft.charge(rest, b.window, b.produces)[1]
                choice = (work > heaviest, work + rest_work - b.work, work, run, rest, b)
                if for_free and choice[1] > 0:
                    continue
                if best is None or choice[:4] < best[:4]:
                    best = choice
        if best is None:
            return
        *_, run, rest, b = best
        for changed, members in ((b, rest), (empty, run)):
            changed.members = members
            changed.rows, changed.work = draft.charge(members, changed.window, changed.produces)


def _sides(draft: Draft, b: Bin) -> list[tuple[list[int], list[int]]]:
    """Both ways to part a bin at its lowest valley: (run that moves, rest that stays)."""
    lcp = draft.units.lcp
    members = b.members
    middle = min(range(1, len(members)), key=lambda k: lcp(members[k - 1], members[k]))
    left, right = members[:middle], members[middle:]
    return [(left, right), (right, left)]
