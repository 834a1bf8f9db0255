"""The planner's searches: filling equals brute force; repacking, levelling and annealing never lose or drop a unit."""

from itertools import product
from random import Random

import numpy as np
import pytest

from harts_hf.planning import fill as filling
from harts_hf.planning.anneal import anneal
from harts_hf.planning.bounds import beats_plans_without_windows, least_rows
from harts_hf.planning.cost import CostModel
from harts_hf.planning.draft import Bin, Draft, SharedPrefix
from harts_hf.planning.level import level
from harts_hf.planning.microbatches import plan_step, to_step_plan
from harts_hf.planning.packing import pack_by_filling
from harts_hf.planning.repack import BIN_WORK, repack
from harts_hf.planning.rewindow import prefix_of
from harts_hf.planning.subtrees import piece_sums, random_order, random_pieces
from harts_hf.planning.units import Units
from harts_hf.tree import PrefixTree

COSTS = (CostModel(), CostModel(pair=0.25, replay=0.5, chunk_size=2, producer=3))


def random_units(rng, cost):
    sequences = [rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(rng.integers(2, 30))]
    return Units.from_tree(PrefixTree.from_sequences(sequences), cost)


def members_of(bins):
    return sorted(u for members in bins for u in members)


@pytest.mark.parametrize("seed", range(200))
def test_filling_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 30, rng.integers(1, 9)).tolist()
    target = int(rng.integers(-2, 120))
    sums = {
        sum(s for s, taken in zip(sizes, mask, strict=True) if taken) for mask in product((0, 1), repeat=len(sizes))
    }
    chosen = filling.fill(sizes, target)
    assert chosen == sorted(set(chosen))
    assert sum(sizes[k] for k in chosen) == max((s for s in sums if s <= target), default=0)


def test_filling_in_grains_stays_within_the_target(monkeypatch):
    monkeypatch.setattr(filling, "RESOLUTION", 64)
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 3000, 12).tolist()
        target = int(rng.integers(1000, 9000))
        total = sum(sizes[k] for k in filling.fill(sizes, target))
        assert total <= target
        assert total >= min(sum(sizes), target) - 13 * (target // 64 + 1) - max(sizes)


@pytest.mark.parametrize("seed", range(100))
def test_a_random_order_is_depth_first(seed):
    """Every subtree stays together: the LCPs of neighbours add up to what they do in the sorted order."""
    units = random_units(np.random.default_rng(seed), CostModel())
    cuts = [0, *units.neighbour_lcps(list(range(len(units))))]
    order, between = random_order(cuts, Random(seed))
    assert sorted(order) == list(range(len(units)))
    assert between == [0, *[units.lcp(min(pair), max(pair)) for pair in zip(order, order[1:], strict=False)]]
    assert sum(between) == sum(cuts)


def test_random_orders_put_each_child_before_or_after_all_later_ones():
    orders = {tuple(random_order([0, 1, 1], Random(seed))[0]) for seed in range(50)}
    assert orders == {(0, 1, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)}


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("even", [False, True])
def test_repacking_never_loses(seed, even):
    rng = np.random.default_rng(seed)
    units = random_units(rng, COSTS[seed % 2])
    max_rows = int(rng.integers(6, 40))
    bins = pack_by_filling(units, units.natural_pieces(max(1, max_rows // int(rng.integers(1, 5)))), max_rows)
    packed = repack(units, bins, max_rows, 3000, even)
    assert members_of(packed) == members_of(bins) == list(range(len(units)))
    before, after = (Draft(units, max_rows, 1, [Bin(members) for members in b]) for b in (bins, packed))
    weight = round(BIN_WORK * max_rows)
    assert after.total_work + weight * len(packed) <= before.total_work + weight * len(bins), f"seed {seed}"
    for draft in (before, after):
        assert all(b.rows <= max_rows or len(b.members) == 1 for b in draft.bins), f"seed {seed}"


@pytest.mark.parametrize("seed", range(100))
@pytest.mark.parametrize("objective", [(0, 1, 2), (1, 0, 2), (2, 0, 1)])
def test_levelling_never_loses(seed, objective):
    rng = np.random.default_rng(seed)
    units = random_units(rng, COSTS[seed % 2])
    max_rows, num_replicas = int(rng.integers(12, 40)), int(rng.integers(1, 4))
    packing = pack_by_filling(units, units.natural_pieces(max_rows), max_rows)
    bins = [Bin(members, k // num_replicas, k % num_replicas) for k, members in enumerate(packing)]
    draft = Draft(units, max_rows, num_replicas, bins)
    before = [draft.objectives()[k] for k in objective]
    level(draft, objective, 5000)
    assert [draft.objectives()[k] for k in objective] <= before, f"seed {seed}"
    assert members_of([b.members for b in draft.bins]) == list(range(len(units)))
    for b in draft.bins:
        assert (b.rows, b.work) == draft.charge(b.members, None, False)
        assert b.rows <= max_rows or len(b.members) == 1, f"seed {seed}"
        assert b.members or objective[0] == 0, "only total work empties a bin"


def windows_hold(draft):
    """A window's bins are consecutive on one replica, the first alone produces, each has a unit with the prefix."""
    units = draft.units
    for k, window in enumerate(draft.windows):
        bins = sorted((b for b in draft.bins if b.window == k and b.members), key=lambda b: b.slot)
        if not bins:
            continue
        assert len({b.replica for b in bins}) == 1
        assert [b.slot for b in bins] == list(range(bins[0].slot, bins[0].slot + len(bins)))
        assert [b.produces for b in bins] == [True] + [False] * (len(bins) - 1)
        assert min(units.common[window.start : window.end]) >= window.tokens
        assert units.lcp(window.start, window.end - 1) >= window.tokens if window.end - window.start > 1 else True
        assert all(draft.may_hold(b, b.members) for b in bins)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("objective", [(1, 0, 2), (2, 0, 1)])
@pytest.mark.parametrize("max_prefix", [0, 3, 100])
def test_annealing_never_loses(seed, objective, max_prefix):
    rng = np.random.default_rng(seed)
    units = random_units(rng, COSTS[seed % 2])
    max_rows, num_replicas = int(rng.integers(12, 40)), int(rng.integers(1, 4))
    packing = pack_by_filling(units, units.natural_pieces(max_rows // 2), max_rows)
    bins = [Bin(members, k // num_replicas, k % num_replicas) for k, members in enumerate(packing)]
    draft = Draft(units, max_rows, num_replicas, bins)
    before = [draft.objectives()[k] for k in objective]
    for heat in (3.0, 0.5):  # the second round starts from windows
        anneal(draft, objective, 8000, max_prefix, heat, seed)
        after = [draft.objectives()[k] for k in objective]
        assert after <= before, f"seed {seed}"
        before = after
        assert members_of([b.members for b in draft.bins]) == list(range(len(units)))
        assert all(b.members for b in draft.bins)
        for b in draft.bins:
            assert (b.rows, b.work) == draft.charge(b.members, b.window, b.produces)
            assert b.rows <= max_rows or len(b.members) == 1, f"seed {seed}"
            assert b.window is None or draft.windows[b.window].tokens <= max_prefix
        windows_hold(draft)


@pytest.mark.parametrize("seed", range(100))
def test_a_new_window_spans_all_units_with_its_prefix(seed):
    rng = np.random.default_rng(seed)
    units = random_units(rng, COSTS[0]).coarsened(int(rng.integers(3, 12)), 30)
    for unit in range(len(units)):
        for tokens in range(1, int(units.common[unit]) + 1):
            prefix = prefix_of(units, unit, tokens)
            near = [units.lcp(min(u, unit), max(u, unit)) if u != unit else tokens for u in range(len(units))]
            inside = [u for u in range(len(units)) if near[u] >= tokens <= units.common[u]]
            assert (prefix.start, prefix.end, prefix.tokens) == (inside[0], inside[-1] + 1, tokens), f"seed {seed}"
            assert inside == list(range(prefix.start, prefix.end)), f"seed {seed}"


def test_annealing_finds_windows_and_swaps():
    """Negative control: without windows each of the two bins computes the prefix."""
    sequences = [[1] * 10 + [k] * 5 for k in range(2, 6)]
    units = Units.from_tree(PrefixTree.from_sequences(sequences), CostModel())

    def annealed(max_prefix):
        draft = Draft(units, 20, 1, [Bin([0, 1], 0), Bin([2, 3], 1)])
        anneal(draft, (1, 0, 2), 3000, max_prefix)
        return draft.objectives()[1]

    assert (annealed(0), annealed(6), annealed(100)) == (40, 34, 30)


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("objective", ["compact_work", "slot_critical", "replica_critical"])
def test_a_plan_that_beats_the_bound_beats_the_plan_without_windows(seed, objective):
    """With windows the plan is no worse, whether or not the full plan without windows is made for the comparison."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(0, 3, 12).tolist()
    sequences = [trunk[: rng.integers(4, 13)] + rng.integers(0, 3, rng.integers(1, 12)).tolist() for _ in range(20)]
    num_replicas, max_tokens = int(rng.integers(1, 4)), int(rng.integers(24, 50))

    def value(windows):
        plan = plan_step(sequences, max_tokens, num_replicas, windows, objective=objective)
        values = plan.compact_tokens, plan.slot_critical_rows, plan.replica_critical_rows
        return values[["compact_work", "slot_critical", "replica_critical"].index(objective)]

    assert value(True) <= value(False), f"seed {seed}"


def test_only_rows_have_a_bound_without_windows():
    units = random_units(np.random.default_rng(0), COSTS[1])
    assert not beats_plans_without_windows(Draft(units, 1000, 1, [Bin(list(range(len(units))))]), (1, 0, 2))
    units = random_units(np.random.default_rng(0), COSTS[0])
    draft = Draft(units, 1000, 1, [Bin(list(range(len(units))))])
    assert draft.total_work == least_rows(units, 1000)
    assert not beats_plans_without_windows(draft, (1, 0, 2))


def test_searches_find_what_a_greedy_packing_misses():
    """Negative control: largest first leaves four bins for what three hold."""
    units = Units.from_tree(
        PrefixTree.from_sequences([[k] * n for k, n in enumerate((6, 6, 5, 5, 4, 4))]), CostModel()
    )
    greedy = [[0, 4], [1, 5], [2], [3]]
    assert len(repack(units, greedy, 10, 3000)) == 3
    bins = [Bin([0, 1], 0, 0), Bin([2], 0, 1), Bin([3, 4, 5], 0, 2)]
    draft = Draft(units, 13, 3, bins)
    level(draft, (1, 0, 2), 3000)
    assert draft.objectives()[1] == 10


@pytest.mark.parametrize("seed", range(50))
def test_sums_of_pieces_are_their_rows(seed):
    units = random_units(np.random.default_rng(seed), COSTS[0])
    if len(units) < 2:
        pytest.skip("one unit has no pieces")
    members = list(range(len(units)))
    cuts = [0, *units.neighbour_lcps(members)]
    pieces = random_pieces(cuts, 5, Random(seed))
    rows = [units.charge(members[start:end])[0] for start, end in pieces]
    assert piece_sums(units.unit_rows, cuts, pieces) == rows, f"seed {seed}"


@pytest.mark.parametrize("members_of_other", [[], [1]])
def test_a_window_of_one_consumer_is_none(members_of_other):
    """Its consumer then shares rows with the members that do not start with the prefix, and is counted so."""
    tree = PrefixTree.from_sequences([[0, 1, 2], [0, 1, 3], [0, 4]])
    units = Units.from_tree(tree, CostModel())
    first = Bin([0, 2] if members_of_other else [0, 1, 2], slot=0, window=0, produces=True)
    other = Bin(members_of_other, slot=1, window=0)
    draft = Draft(units, 10, 1, [Bin([*b.members], slot=b.slot) for b in (first, other)], [SharedPrefix(0, 2, 2)])
    for b, as_meant in zip(draft.bins, (first, other), strict=True):
        b.window, b.produces = 0, as_meant.produces
        b.rows, b.work = draft.charge(b.members, 0, b.produces)
    plan = to_step_plan(draft, tree, "compact_work")
    if members_of_other:
        assert [m.window for m in plan.microbatches] == [0, 0] and len(plan.windows) == 1
        assert plan.slot_rows == ((5,), (1,))  # [0, 1] produced, [2], and [0, 4] from its root; [3]
    else:
        assert plan.windows == () and plan.slot_rows == ((5,),)  # [0, 1, 2], [3], [4]
