"""Levelling: local search that evens out a draft's slots by exact filling, two or three bins at a time.

A heuristic. A step takes the heaviest bin of a slot and one or two others, parts their units into subtrees, and fills
the others anew: up to the heaviest of their slot, or to an even share if they are in the heavy one's slot. The heavy
bin keeps the rest. A result is kept if the sum of the slots' heaviest grows by no more than a tolerance that falls to
0, and at a growth equal to it the sum of squared works does not grow. If total work comes first, it is kept if total
work falls, or stays and the sum of the heaviest does not grow. Random choices come from a fixed seed.
"""

from random import Random

from .draft import Bin, Draft
from .fill import fill
from .seating import Seating
from .subtrees import piece_sums, random_pieces

SEED = 0
STEP_OVERHEAD = 20  # a step costs as much as charging this many units
ONE_OTHER = 0.7  # steps that take one other bin at most; the rest take two
MAX_PIECES = 32  # subtrees that a filling chooses from
STEPS_PER_SEAT = 50  # units charged for each unit and bin: a small draft is searched through sooner
TOLERANCE = 0.01  # of the budget: how much a step may lose at first, so that the search leaves local optima


def level(draft: Draft, objective: tuple[int, ...], unit_steps: int) -> None:
    """Improve a draft in place, or leave it; slots, replicas and windows stay, membership changes.

    Args:
        draft: the draft to improve.
        objective: order of comparison, indices into `Draft.objectives()`.
        unit_steps: most units charged over all steps, which bounds the time whatever the draft holds.
    """
    before = draft.objectives()
    held = [(b.members, b.rows, b.work) for b in draft.bins]
    search = _Levelling(draft, objective)
    left = unit_steps = min(unit_steps, STEPS_PER_SEAT * len(draft.units) * len(draft.bins))
    while left > 0:
        left -= search.step(int(TOLERANCE * draft.max_rows * left / unit_steps)) + STEP_OVERHEAD
    after = draft.objectives()
    if [after[k] for k in objective] > [before[k] for k in objective]:
        for b, (members, rows, work) in zip(draft.bins, held, strict=True):
            b.members, b.rows, b.work = members, rows, work


class _Levelling(Seating):
    def __init__(self, draft: Draft, objective: tuple[int, ...]):
        self.draft = draft
        self.work_first = objective[0] == 0
        self.random = Random(SEED)
        super().__init__(draft)

    def step(self, tolerance: int) -> int:
        """Fill a few bins anew; returns the number of their units."""
        heavy = max(self.slots[int(self.random.random() * len(self.slots))], key=lambda b: b.work)
        others = self._others(heavy) if heavy.members else []
        members = sorted([u for b in (heavy, *others) for u in b.members])
        if not others or len(members) < 2:
            return 0
        filled = self._fill(heavy, others, members)
        changes = []
        for b, held in filled:
            rows, work = self.draft.charge(held, b.window, b.produces)
            may_empty = self.work_first and b.window is None
            emptied = bool(b.members) and not held and not may_empty
            oversized = rows > self.draft.max_rows and len(held) > 1
            if emptied or oversized or not self.draft.may_hold(b, held):
                return len(members)
            changes.append((b, held, rows, work))
        if self._growth(changes) <= ((0, 0) if self.work_first else (tolerance, 0)):
            self.put(changes)
        return len(members)

    def _others(self, heavy: Bin) -> list[Bin]:
        """One or two bins: owners of the heavy one's neighbours, of its slot, or any."""
        draw = self.random.random  # `choice` takes five times as long
        others: list[Bin] = []
        for _ in range(1 if draw() < ONE_OTHER else 2):
            way = draw()
            if way < 0.4:
                near = heavy.members[int(draw() * len(heavy.members))] + (1 if draw() < 0.5 else -1)
                b = self.owner[near] if 0 <= near < len(self.owner) else heavy
            else:
                bins = self.slots[heavy.slot] if way < 0.7 else self.draft.bins
                b = bins[int(draw() * len(bins))]
            if b is not heavy and b not in others:
                others.append(b)
        return others

    def _fill(self, heavy: Bin, others: list[Bin], members: list[int]) -> list[tuple[Bin, list[int]]]:
        """What each bin would hold; pieces are taken to share what all the units do, or the bin's window."""
        units, draft = self.draft.units, self.draft
        unit_work, shared_work = units.unit_work, units.cost.shared_work
        cuts = [0, *units.neighbour_lcps(members)]
        pieces = random_pieces(cuts, MAX_PIECES, self.random)
        shared = shared_work(min(cuts[1:]))
        saved = cuts if units.cost.counts_rows else [shared_work(c) for c in cuts]
        works = piece_sums([unit_work[u] for u in members], saved, pieces)
        filled = []
        sharers = 1 + sum(b.slot == heavy.slot for b in others)
        share = (sum(works) - shared * len(works)) // sharers
        for b in others:
            base, discounts = shared, [shared] * len(pieces)
            if b.window is not None:
                window = draft.windows[b.window]
                discount = units.cost.prefix_work(window.tokens)
                base = discount if b.produces else 0
                inside = [window.start <= members[s] < window.end for s, _ in pieces]
                discounts = [discount if i else 0 for i in inside]
            target = share if b.slot == heavy.slot else self.heaviest[b.slot] - base
            sizes = [max(1, work - discount) for work, discount in zip(works, discounts, strict=True)]
            chosen = set(fill(sizes, target))
            filled.append((b, sorted([u for k in chosen for u in members[pieces[k][0] : pieces[k][1]]])))
            works = [work for k, work in enumerate(works) if k not in chosen]
            pieces = [piece for k, piece in enumerate(pieces) if k not in chosen]
        filled.append((heavy, sorted([u for s, e in pieces for u in members[s:e]])))
        return filled

    def _growth(self, changes: list[tuple[Bin, list[int], int, int]]) -> tuple[int, int]:
        """Growth of the first objective, and of what decides at an equal one."""
        after = {id(b): work for b, _, _, work in changes}
        total = squares = critical = 0
        for b, _, _, work in changes:
            total += work - b.work
            squares += work * work - b.work * b.work
        for slot in dict.fromkeys([b.slot for b, *_ in changes]):
            critical += max([after.get(id(b), b.work) for b in self.slots[slot]]) - self.heaviest[slot]
        return (total, critical) if self.work_first else (critical, squares)
