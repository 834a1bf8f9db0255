"""Local search on a draft: runs of units move or change places between microbatches while an objective falls.

A heuristic. The heaviest microbatch of a slot sets the slot's time, so only its runs are tried, larger subtrees first,
in microbatches that have room below their own slot's heaviest and in those that already share a prefix with the run. A
step is taken when it lowers the objective tuple; ties go to the more even distribution. The number of steps is bounded
by the size of the draft, never by a clock, so that every rank takes the same ones.
"""

from bisect import bisect_left
from itertools import accumulate

import numpy as np

from .draft import Bin, Draft
from .seating import Seating

MAX_RUNS = 16  # runs of a bin that are tried, larger subtrees first
MAX_TARGETS = 8  # bins with the most room that are tried, in the whole step and in the slot
MAX_SWAPS = 4  # exchanges with a bin that are evaluated, closest to even first
IDLE_SHARE = 1 / 500  # a slot whose replicas idle less than this share of its work is left alone


def refine(draft: Draft, objective: tuple[int, ...], max_rounds: int = 6) -> None:
    """Improve a draft in place; slots, replicas and windows stay, membership changes.

    Args:
        draft: the draft to improve.
        objective: order of comparison, indices into (total work, sum of the slots' heaviest, largest replica work).
        max_rounds: most passes over the slots.
    """
    search = _Search(draft, objective)
    for _ in range(max_rounds):
        slots = sorted(range(len(search.slots)), key=lambda s: (-search.idle_work(s), s))
        improved = False
        for slot in slots:
            while search.improve(slot):
                improved = True
        if not improved:
            return


class _Runs:
    """Subtrees of a bin by recursive valleys, their rows and work, and the work that leaves the bin with them."""

    def __init__(self, draft: Draft, b: Bin):
        units, members = draft.units, b.members
        shared_work = units.cost.shared_work
        cuts = [0] * bool(members) + units.neighbour_lcps(members)
        rows = list(accumulate((units.unit_rows[u] - c for u, c in zip(members, cuts, strict=True)), initial=0))
        saved = [shared_work(c) for c in cuts]
        work = list(accumulate((units.unit_work[u] - s for u, s in zip(members, saved, strict=True)), initial=0))
        self.spans: list[tuple[int, int]] = []
        level = [(0, len(members), 0)]  # span and the LCP across it from outside
        self.rows: list[int] = []
        self.work: list[int] = []
        self.freed: list[int] = []
        while level and len(self.spans) < MAX_RUNS:
            below = []
            for start, end, across in level:
                if end - start < len(members):
                    self.spans.append((start, end))
                    self.rows.append(rows[end] - rows[start] + cuts[start])
                    self.work.append(work[end] - work[start] + saved[start])
                    # leaving joins the neighbours on both sides, which share `across` tokens
                    after = saved[end] if end < len(members) else 0
                    joined = shared_work(across) if start > 0 and end < len(members) else 0
                    self.freed.append(work[end] - work[start] - after + joined)
                if end - start > 1:
                    middle = min(range(start + 1, end), key=cuts.__getitem__)
                    after = cuts[end] if end < len(members) else 0
                    below.append((start, middle, min(cuts[start], cuts[middle])))
                    below.append((middle, end, min(cuts[middle], after)))
            level = below
        if not draft.is_one_tree(b, members):  # what leaves does not follow from neighbours
            self.freed = [
                b.work - draft.charge(members[:start] + members[end:], b.window, b.produces)[1]
                for start, end in self.spans
            ]


class _Search(Seating):
    def __init__(self, draft: Draft, objective: tuple[int, ...]):
        self.draft = draft
        self.objective = [k for k in objective if k < 2]  # the largest replica work follows from the slots' evenness
        self.slots_first = self.objective[0] == 1
        self.units = draft.units
        super().__init__(draft)
        self.runs: dict[int, _Runs] = {}  # by identity of a bin, dropped when the bin changes
        self.work = np.array([b.work for b in draft.bins])
        self.slot_of = np.array([b.slot for b in draft.bins])
        self.index = {id(b): k for k, b in enumerate(draft.bins)}
        self.steps_left = 20 * len(draft.bins) + 200

    def idle_work(self, slot: int) -> int:
        return self.heaviest[slot] * self.draft.num_replicas - sum(b.work for b in self.slots[slot])

    def improve(self, slot: int) -> bool:
        """Take the best step that relieves the slot's heaviest bin; False if there is none."""
        if self.idle_work(slot) <= IDLE_SHARE * self.heaviest[slot] * self.draft.num_replicas or not self.steps_left:
            return False
        heavy = max(self.slots[slot], key=lambda b: b.work)
        if len(heavy.members) < 2:
            return False
        best = self._best_move(heavy) or self._best_swap(heavy)
        if best is None:
            return False
        self.steps_left -= 1
        self.put([(b, members, *self.draft.charge(members, b.window, b.produces)) for b, members in best])
        for b, _ in best:
            self.runs.pop(id(b), None)
            self.work[self.index[id(b)]] = b.work
        return True

    def _runs_of(self, b: Bin) -> _Runs:
        if id(b) not in self.runs:
            self.runs[id(b)] = _Runs(self.draft, b)
        return self.runs[id(b)]

    def _targets(self, heavy: Bin) -> list[Bin]:
        """Bins with the most room below their slot's heaviest, and the lightest ones of the same slot."""
        room = self.work - np.array(self.heaviest)[self.slot_of]
        room[self.index[id(heavy)]] = 1  # last, since no other is above 0
        targets = [self.draft.bins[k] for k in np.argsort(room, kind="stable")[:MAX_TARGETS] if room[k] < 1]
        same = sorted((b for b in self.slots[heavy.slot] if b is not heavy), key=lambda b: b.work)
        return targets + [b for b in same[:MAX_TARGETS] if b not in targets]

    def _best_move(self, heavy: Bin):
        best, best_change = None, self._no_change()
        room = self._targets(heavy)
        runs = self._runs_of(heavy)
        cuts, shared_work, max_rows = [*self.units.cuts, 0], self.units.cost.shared_work, self.draft.max_rows
        second = max((b.work for b in self.slots[heavy.slot] if b is not heavy), default=0)
        for k, (start, end) in enumerate(runs.spans):
            run = heavy.members[start:end]
            # no bin shares more with the run than the neighbours of its ends do
            most = max(cuts[run[0]], cuts[run[-1] + 1])
            least_rows, least_work = runs.rows[k] - most, runs.work[k] - shared_work(most)
            relief = max(second, heavy.work - runs.freed[k]) - heavy.work
            targets = list(room)
            for neighbour in (run[0] - 1, run[-1] + 1):
                if 0 <= neighbour < len(self.owner):
                    b = self.owner[neighbour]
                    if b is not heavy and b not in targets:
                        targets.append(b)
            for b in targets:
                if b.window is None and b.rows + least_rows > max_rows:
                    continue
                if self.slots_first and b.window is None and b.slot != heavy.slot:
                    if relief + max(0, b.work + least_work - self.heaviest[b.slot]) > best_change[0]:
                        continue
                at = bisect_left(b.members, run[0])
                part = self.draft.part_with(b, run) if b.members else None
                if part is None:
                    joined = sorted(b.members + run)
                    rows, work = self.draft.charge(joined, b.window, b.produces)
                    rows, work = rows - b.rows, work - b.work
                elif at < len(b.members) and b.members[at] < run[-1]:
                    continue
                else:
                    where = bisect_left(part, run[0])
                    rows, work = self._joining(part, where, run, runs.rows[k], runs.work[k])
                    joined = b.members[:at] + run + b.members[at:]
                if b.rows + rows > max_rows:
                    continue
                change = self._change(heavy, -runs.freed[k], b, work)
                if change >= best_change:
                    continue
                rest = heavy.members[:start] + heavy.members[end:]
                if self.draft.may_hold(heavy, rest) and self.draft.may_hold(b, joined):
                    best_change, best = change, [(heavy, rest), (b, joined)]
        return best

    def _joining(self, members: list[int], at: int, run: list[int], rows: int, work: int) -> tuple[int, int]:
        """Rows and work that a run adds to a bin in front of its member `at`."""
        shared_work = self.units.cost.shared_work
        left = self.units.lcp(members[at - 1], run[0]) if at else 0
        right = self.units.lcp(run[-1], members[at]) if at < len(members) else 0
        rows -= max(left, right)
        if at:
            work -= shared_work(left)
        if at < len(members):
            work -= shared_work(right)
        if 0 < at < len(members):
            work += shared_work(min(left, right))
        return rows, work

    def _best_swap(self, heavy: Bin):
        best, best_change = None, self._no_change()
        draft, max_rows = self.draft, self.draft.max_rows
        ours = self._runs_of(heavy)
        for b in self._targets(heavy):
            theirs = self._runs_of(b)
            wanted = (heavy.work - b.work) // 2
            off = np.abs(np.subtract.outer(np.array(ours.freed), np.array(theirs.freed)) - wanted).ravel()
            for pair in np.argsort(off, kind="stable")[:MAX_SWAPS].tolist():
                if off[pair] >= wanted:
                    break  # the two bins would be less even than before
                i, j = divmod(pair, len(theirs.freed))
                (start, end), (other_start, other_end) = ours.spans[i], theirs.spans[j]
                given, taken = heavy.members[start:end], b.members[other_start:other_end]
                heavy_members = sorted(heavy.members[:start] + heavy.members[end:] + taken)
                b_members = sorted(b.members[:other_start] + b.members[other_end:] + given)
                heavy_rows, heavy_work = draft.charge(heavy_members, heavy.window, heavy.produces)
                b_rows, b_work = draft.charge(b_members, b.window, b.produces)
                if heavy_rows > max_rows or b_rows > max_rows:
                    continue
                change = self._change(heavy, heavy_work - heavy.work, b, b_work - b.work)
                if change < best_change and draft.may_hold(heavy, heavy_members) and draft.may_hold(b, b_members):
                    best_change, best = change, [(heavy, heavy_members), (b, b_members)]
        return best

    def _no_change(self) -> tuple[int, ...]:
        return (0,) * (len(self.objective) + 1)

    def _change(self, heavy: Bin, heavy_delta: int, b: Bin, delta: int) -> tuple[int, ...]:
        """Change of the objectives, and of the sum of squared works as the last tie-break."""
        heavy_work, work = heavy.work + heavy_delta, b.work + delta
        squares = heavy_work * heavy_work - heavy.work * heavy.work + work * work - b.work * b.work
        rest = max((c.work for c in self.slots[heavy.slot] if c is not heavy and c is not b), default=0)
        if b.slot == heavy.slot:
            heaviest = max(rest, heavy_work, work) - self.heaviest[heavy.slot]
        else:
            heaviest = max(rest, heavy_work) - self.heaviest[heavy.slot]
            heaviest += max(0, work - self.heaviest[b.slot])  # the search only ever adds work to `b`
        values = (heavy_delta + delta, heaviest)
        return (*(values[k] for k in self.objective), squares)
