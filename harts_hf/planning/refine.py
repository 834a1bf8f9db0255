"""Local search on a draft: runs of units move or change places between microbatches while an objective falls.

A heuristic. The heaviest microbatch of a slot sets the slot's time, so only its runs are tried, subtrees first: in
microbatches that have room below their own slot's heaviest, and in those that already share a prefix with the run. A
step is taken when it lowers the objective tuple; ties go to the more even distribution. The number of steps tried is
bounded by the size of the draft, never by a clock, so that every rank takes the same ones.
"""

from bisect import bisect_left

from .draft import Bin, Draft

MAX_RUNS = 32  # runs of the heaviest bin that are tried, largest subtrees first
MAX_TARGETS = 6  # bins with the most room that are tried for each run
MAX_SWAPS = 6  # exchanges that are tried with each bin, closest to even first


def refine(draft: Draft, objective: tuple[int, ...], max_rounds: int = 12) -> None:
    """Improve a draft in place; slots, replicas and windows stay, membership changes.

    Args:
        draft: the draft to improve.
        objective: order of comparison, indices into (total work, sum of the slots' heaviest, largest replica work).
        max_rounds: most passes over the slots.
    """
    search = _Search(draft, objective)
    for _ in range(max_rounds):
        slots = sorted(range(len(search.slots)), key=lambda s: (search.idle_work(s), s), reverse=True)
        improved = False
        for slot in slots:
            while search.improve(slot):
                improved = True
        if not improved:
            return


class _Search:
    def __init__(self, draft: Draft, objective: tuple[int, ...]):
        self.draft = draft
        self.objective = [k for k in objective if k < 2]  # replica work follows from the slots' evenness
        self.units = draft.units
        self.shared_work = draft.units.cost.shared_work
        self.slots: list[list[Bin]] = [[] for _ in range(draft.num_slots)]
        self.owner: list[Bin] = [draft.bins[0]] * len(draft.units)
        for b in draft.bins:
            self.slots[b.slot].append(b)
            for u in b.members:
                self.owner[u] = b
        self.heaviest = [max(b.work for b in slot) for slot in self.slots]
        self.budget = 40 * len(draft.bins) + 400  # improving steps, a bound that is rarely met

    def idle_work(self, slot: int) -> int:
        return self.heaviest[slot] * self.draft.num_replicas - sum(b.work for b in self.slots[slot])

    def improve(self, slot: int) -> bool:
        """Take the best step that relieves the slot's heaviest bin; False if there is none."""
        heavy = max(self.slots[slot], key=lambda b: b.work)
        if len(heavy.members) < 2 or self.budget == 0:
            return False
        runs = self._runs(heavy.members)
        best = self._best_move(heavy, runs)
        if best is None:
            best = self._best_swap(heavy, runs)
        if best is None:
            return False
        self.budget -= 1
        for b, members in best:
            b.members = members
            b.rows, b.work = self.draft.charge(members, b.window, b.produces)
            for u in members:
                self.owner[u] = b
        for b, _ in best:
            self.heaviest[b.slot] = max(c.work for c in self.slots[b.slot])
        return True

    def _runs(self, members: list[int]) -> list[tuple[int, int]]:
        """Index ranges of members: subtrees by recursive valleys, the larger ones first, without the whole."""
        cuts = [0] + [self.units.lcp(a, b) for a, b in zip(members, members[1:], strict=False)]
        runs = []
        level = [(0, len(members))]
        while level and len(runs) < MAX_RUNS:
            below = []
            for start, end in level:
                if end - start < len(members):
                    runs.append((start, end))
                if end - start > 1:
                    middle = min(range(start + 1, end), key=cuts.__getitem__)
                    below += [(start, middle), (middle, end)]
            level = below
        return runs[:MAX_RUNS]

    def _targets(self, heavy: Bin) -> list[Bin]:
        """Bins with the most room below their slot's heaviest, and the lightest ones of the same slot."""
        others = [b for b in self.draft.bins if b is not heavy]
        others.sort(key=lambda b: b.work - self.heaviest[b.slot])
        same = sorted((b for b in self.slots[heavy.slot] if b is not heavy), key=lambda b: b.work)
        targets = others[:MAX_TARGETS]
        return targets + [b for b in same[:MAX_TARGETS] if b not in targets]

    def _may_hold(self, b: Bin, first: int, last: int) -> bool:
        if b.window is None:
            return True
        window = self.draft.windows[b.window]
        return window.start <= first and last < window.end

    def _best_move(self, heavy: Bin, runs: list[tuple[int, int]]):
        best, best_change = None, self._no_change()
        room = self._targets(heavy)
        for start, end in runs:
            run = heavy.members[start:end]
            rest = heavy.members[:start] + heavy.members[end:]
            rest_rows, rest_work = self.draft.charge(rest, heavy.window, heavy.produces)
            targets = list(room)
            for neighbour in (run[0] - 1, run[-1] + 1):
                if 0 <= neighbour < len(self.owner):
                    b = self.owner[neighbour]
                    if b is not heavy and b not in targets:
                        targets.append(b)
            run_rows, run_work = self.draft.charge(run, None, False)
            for b in targets:
                if not self._may_hold(b, run[0], run[-1]):
                    continue
                at = bisect_left(b.members, run[0])
                if at != bisect_left(b.members, run[-1]):
                    continue
                if b.members:
                    rows, work = self._joining(b.members, at, run, run_rows, run_work)
                else:
                    rows, work = self.draft.charge(run, b.window, b.produces)
                if b.rows + rows > self.draft.max_rows:
                    continue
                change = self._change([(heavy, rest_work), (b, b.work + work)])
                if change < best_change:
                    best_change = change
                    best = [(heavy, rest), (b, b.members[:at] + run + b.members[at:])]
        return best

    def _joining(self, members: list[int], at: int, run: list[int], rows: int, work: int) -> tuple[int, int]:
        """Rows and work that a run adds to a bin in front of its member `at`."""
        left = self.units.lcp(members[at - 1], run[0]) if at else None
        right = self.units.lcp(run[-1], members[at]) if at < len(members) else None
        for lcp in (left, right):
            if lcp is not None:
                rows -= lcp
                work -= self.shared_work(lcp)
        if left is not None and right is not None:
            rows += min(left, right)
            work += self.shared_work(min(left, right))
        return rows, work

    def _best_swap(self, heavy: Bin, runs: list[tuple[int, int]]):
        best, best_change = None, self._no_change()
        max_rows = self.draft.max_rows
        charge = self.draft.charge
        heavy_rests = [heavy.members[:s] + heavy.members[e:] for s, e in runs]
        heavy_freed = [heavy.work - charge(rest, heavy.window, heavy.produces)[1] for rest in heavy_rests]
        for b in self._targets(heavy):
            wanted = (heavy.work - b.work) // 2
            pairs = []
            b_runs = self._runs(b.members)
            b_rests = [b.members[:s] + b.members[e:] for s, e in b_runs]
            b_freed = [b.work - charge(rest, b.window, b.produces)[1] for rest in b_rests]
            for i, freed in enumerate(heavy_freed):
                for j, other in enumerate(b_freed):
                    if 0 < freed - other < 2 * wanted:
                        pairs.append((abs(freed - other - wanted), i, j))
            for _, i, j in sorted(pairs)[:MAX_SWAPS]:
                run = heavy.members[slice(*runs[i])]
                other = b.members[slice(*b_runs[j])]
                if not self._may_hold(b, run[0], run[-1]) or not self._may_hold(heavy, other[0], other[-1]):
                    continue
                heavy_members = sorted(heavy_rests[i] + other)
                b_members = sorted(b_rests[j] + run)
                heavy_rows, heavy_work = charge(heavy_members, heavy.window, heavy.produces)
                b_rows, b_work = charge(b_members, b.window, b.produces)
                if heavy_rows > max_rows or b_rows > max_rows:
                    continue
                change = self._change([(heavy, heavy_work), (b, b_work)])
                if change < best_change:
                    best_change = change
                    best = [(heavy, heavy_members), (b, b_members)]
        return best

    def _no_change(self) -> tuple[int, ...]:
        return (0,) * (len(self.objective) + 1)

    def _change(self, new_works: list[tuple[Bin, int]]) -> tuple[int, ...]:
        """Change of the objectives, and of the sum of squared works as the last tie-break."""
        total = squares = 0
        for b, work in new_works:
            total += work - b.work
            squares += work * work - b.work * b.work
        heaviest = 0
        for slot in {b.slot for b, _ in new_works}:
            changed = {id(b): work for b, work in new_works if b.slot == slot}
            heaviest += max(changed.get(id(b), b.work) for b in self.slots[slot]) - self.heaviest[slot]
        values = (total, heaviest)
        return (*(values[k] for k in self.objective), squares)
