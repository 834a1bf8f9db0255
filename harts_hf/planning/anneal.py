"""Annealing: local search that moves runs of units between bins, and the bins in and out of sharing windows.

A heuristic for drafts of few units, where filling (`level.py`) has little to choose from. A step moves a run of units
from one bin to another, or lets two runs change places; with windows it may instead change one (`rewindow.py`). The
energy is the sum of the slots' heaviest plus `TOTAL_SHARE` of the mean work of a replica. A step that raises it by `d`
is taken with probability `exp(-d / t)`; the temperature `t` falls to 0. Random choices come from a fixed seed.
"""

from collections.abc import Callable, Sequence
from math import exp
from random import Random

from .draft import Bin, Draft
from .rewindow import Seat, rewindow
from .seating import Seating

STEP_OVERHEAD = 20  # a step costs as much as charging this many units
STEPS_PER_SEAT = 400  # units charged for each unit and bin, at most: a small draft is searched through sooner
TOTAL_SHARE = 0.3  # of a replica's mean work in the energy: what slots that are not even yet have to gain
TEMPERATURE = 0.03  # of the budget, at the start
HEAVY_SHARE = 0.6  # steps that start from the heaviest bin of a slot; the others start from any
SWAP_SHARE = 0.5  # steps in which two runs change places
SUBTREE_SHARE = 0.4  # runs that are widened to a subtree; the others are single units
REWINDOW_SHARE = 0.4  # steps that change a window, if windows may change

_Held = tuple[list[int], int | None, bool, int, int]  # what a bin holds: members, window, produces, rows, work


def anneal(
    draft: Draft, objective: tuple[int, ...], unit_steps: int, max_prefix: int = 0, heat: float = 1.0, seed: int = 0
) -> None:
    """Improve a draft in place, or leave it; the bins stay on the grid, membership and windows change.

    Args:
        draft: the draft to improve; no cell that holds units becomes empty.
        objective: order of comparison, indices into `Draft.objectives()`.
        unit_steps: most units charged over all steps, which bounds the time whatever the draft holds.
        max_prefix: longest prefix that a new window may share, in rows; at 0 windows stay as they are.
        heat: factor of the starting temperature; a later round starts colder.
        seed: of the random choices.
    """
    search = _Annealing(draft, max_prefix, seed)
    before, start = draft.objectives(), search.best
    hottest = heat * TEMPERATURE * draft.max_rows
    left = unit_steps = min(unit_steps, STEPS_PER_SEAT * len(draft.units) * len(draft.bins))
    while left > 0:
        left -= search.step(hottest * (left / unit_steps) ** 2) + STEP_OVERHEAD
    _set(draft.bins, search.best)
    after = draft.objectives()
    if [after[k] for k in objective] > [before[k] for k in objective]:
        _set(draft.bins, start)


def anneal_uneven(
    draft: Draft,
    objective: tuple[int, ...],
    place: Callable[[], None],
    *,
    even_enough: float,
    heats: Sequence[float],
    unit_steps: int,
    max_prefix: int = 0,
) -> None:
    """Anneal a draft in rounds, unless its slots are even or total work comes first.

    Args:
        draft, objective, unit_steps, max_prefix: as for [`anneal`], `unit_steps` of each round.
        place: improves the places of the draft's bins, after each round.
        even_enough: balance by work above which a draft is left as it is.
        heats: of the rounds; each has a seed of its own.
    """
    total, critical, _ = draft.objectives()
    if objective[0] == 0 or total > even_enough * draft.num_replicas * critical:
        return
    for seed, heat in enumerate(heats):
        anneal(draft, objective, unit_steps, max_prefix, heat, seed)
        place()


def _state(bins: list[Bin]) -> list[_Held]:
    return [(b.members, b.window, b.produces, b.rows, b.work) for b in bins]


def _set(bins: list[Bin], state: list[_Held]) -> None:
    for b, held in zip(bins, state, strict=True):
        b.members, b.window, b.produces, b.rows, b.work = held


class _Annealing(Seating):
    def __init__(self, draft: Draft, max_prefix: int, seed: int):
        self.draft, self.max_prefix = draft, max_prefix
        self.random = Random(seed)
        self.cells = {(b.slot, b.replica): b for b in draft.bins}
        super().__init__(draft)
        total, critical, _ = draft.objectives()
        self.value = self.best_value = (critical, total)
        self.best = _state(draft.bins)

    def step(self, temperature: float) -> int:
        """Try one change; returns the number of units charged."""
        draw = self.random.random
        slot = self.slots[int(draw() * len(self.slots))]
        bins = slot if draw() >= HEAVY_SHARE else [max(slot, key=lambda b: b.work)]
        b = bins[int(draw() * len(bins))]
        if not b.members:
            return 0
        if self.max_prefix and draw() < REWINDOW_SHARE:
            seats = rewindow(self.draft, self.cells, b, self.max_prefix, self.random)
        else:
            seats = self._exchange(b)
        return self._try(seats, temperature) if seats else 0

    def _exchange(self, b: Bin) -> list[Seat]:
        """A run of the bin goes to another one, maybe for a run of that one."""
        draw = self.random.random
        start, end = self._run(b.members)
        run, rest = b.members[start:end], b.members[:start] + b.members[end:]
        way = draw()
        if way < 0.4:
            near = run[0] - 1 if draw() < 0.5 else run[-1] + 1
            other = self.owner[near] if 0 <= near < len(self.owner) else b
        else:
            bins = self.slots[b.slot] if way < 0.7 else self.draft.bins
            other = bins[int(draw() * len(bins))]
        if other is b:
            return []
        theirs = other.members
        if theirs and draw() < SWAP_SHARE:
            start, end = self._run(theirs)
            rest, theirs = sorted(rest + theirs[start:end]), theirs[:start] + theirs[end:]
        if not rest:
            return []
        return [(other, sorted(theirs + run), other.window, other.produces), (b, rest, b.window, b.produces)]

    def _run(self, members: list[int]) -> tuple[int, int]:
        """Ends of a random run: one unit, or what shares most or least with it of what its neighbours do."""
        draw, lcp = self.random.random, self.draft.units.lcp
        at = int(draw() * len(members))
        start, end = at, at + 1
        if draw() < SUBTREE_SHARE:
            left = lcp(members[at - 1], members[at]) if at else 0
            right = lcp(members[at], members[at + 1]) if end < len(members) else 0
            shared = max(left, right) if draw() < 0.7 else min(left, right)
            if shared:
                while start and lcp(members[start - 1], members[start]) >= shared:
                    start -= 1
                while end < len(members) and lcp(members[end - 1], members[end]) >= shared:
                    end += 1
        return start, end

    def _try(self, seats: list[Seat], temperature: float) -> int:
        """Charge bins as they would be, and take the change or not."""
        draft = self.draft
        charged = 0
        bins = [b for b, *_ in seats]
        before = _state(bins)
        fits = True
        for b, members, window, produces in seats:
            charged += len(members)
            b.members, b.window, b.produces = members, window, produces
            b.rows, b.work = draft.charge(members, window, produces)
            if (b.rows > draft.max_rows and len(members) > 1) or not draft.may_hold(b, members):
                fits = False
                break
        if fits:
            heaviest = {s: max([c.work for c in self.slots[s]]) for s in dict.fromkeys([b.slot for b in bins])}
            critical = sum([work - self.heaviest[s] for s, work in heaviest.items()])
            total = sum([b.work for b in bins]) - sum([held[4] for held in before])
            growth = critical + TOTAL_SHARE * total / draft.num_replicas
            if growth <= 0 or (temperature > 0 and self.random.random() < exp(-growth / temperature)):
                for b, members, *_ in seats:
                    for u in members:
                        self.owner[u] = b
                for s, work in heaviest.items():
                    self.heaviest[s] = work
                self.value = (self.value[0] + critical, self.value[1] + total)
                if self.value < self.best_value:
                    self.best_value, self.best = self.value, _state(draft.bins)
                    charged += len(self.best)
                return charged
        _set(bins, before)
        return charged
