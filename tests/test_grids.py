"""The grid of the least cost: exact against every grid there is, and within its limit."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.errors import PlanError
from aot_lora.plan import Module, Plan, TargetSpec, UserEntry, build_plan
from aot_lora.plan.budget import Limits, bill, broken, most_variants
from aot_lora.plan.changes import changes, smallest, subsets
from aot_lora.plan.chips import roofline, work
from aot_lora.plan.grids import Grid, Search
from aot_lora.plan.mix import LaneCost, Mix, mix_of_points, mix_of_steps
from aot_lora.plan.simulate import Steps

ENTRIES = (
    UserEntry(name="step", entry="engine:step"),
    UserEntry(name="few", entry="engine:few", max_tokens=9),
    UserEntry(name="some", entry="engine:some", max_tokens=17),
)
MODULES = tuple(Module(name=name, d=8, o=o, layers=2) for name, o in (("q", 8), ("k", 4)))


def plan_of(grid: Grid, user: Sequence[UserEntry] = (), *, with_lora: bool = True) -> Plan:
    def up(most: int | None) -> int | None:
        return None if most is None else min(b for b in grid.tokens if b >= most)

    return build_plan(
        token_buckets=grid.tokens,
        slots=grid.slots,
        ranks=grid.ranks,
        modules=MODULES,
        layers=2,
        dtype="bfloat16",
        quantum=2,
        max_adapters=8,
        resident_lanes=64,
        with_lora=with_lora,
        user=tuple(
            UserEntry(name=e.name, entry=e.entry, max_tokens=up(e.max_tokens)) for e in user
        ),
    )


WORK = work(plan_of(Grid(tokens=(32,), slots=(2,), ranks=(8,))))
ROOF: LaneCost = lambda lanes: lambda buckets: np.maximum(700 + 9 * lanes, buckets * (30 + lanes))  # noqa: E731
# The more lanes, the less a further token costs: no bound but the plain one holds for it.
FLATTENING: LaneCost = lambda lanes: lambda buckets: np.sqrt(buckets + 5 * lanes)  # noqa: E731
COSTS: dict[str, LaneCost] = {
    "work": WORK,
    "roofline": ROOF,
    "flattening": FLATTENING,
    "tokens": lambda _: lambda buckets: buckets,
}

STEPS = st.dictionaries(
    st.tuples(st.integers(1, 32), st.integers(0, 3)), st.integers(1, 9), min_size=1, max_size=8
)


def mix_of(steps: dict[tuple[int, int], int], ranks: dict[int, int]) -> Mix:
    tokens = sorted({t for t, _ in steps})
    slots = sorted({s for _, s in steps})
    counts = np.zeros((len(tokens), len(slots)))
    for (t, s), n in steps.items():
        counts[tokens.index(t), slots.index(s)] = n
    shares = np.array(list(ranks.values()), float)
    return Mix(
        tokens=np.array(tokens),
        slots=np.array(slots),
        counts=counts,
        ranks=np.array(list(ranks)),
        shares=shares / shares.sum(),
    )


def cost_by_hand(
    steps: dict[tuple[int, int], int], ranks: dict[int, int], grid: Grid, cost: LaneCost
) -> float:
    """Each step under each choice of ranks of its adapters, one after the other."""
    plan, total, all_ = plan_of(grid), 0.0, sum(ranks.values())
    for (tokens, slots), count in steps.items():
        bucket = min(b for b in grid.tokens if b >= tokens)
        for chosen in itertools.product(ranks, repeat=slots):
            share = np.prod([ranks[r] / all_ for r in chosen])
            owned = sum(-(-r // plan.quantum) * plan.quantum for r in chosen)
            lanes = 0 if not owned and 0 in grid.slots else plan.lanes.bucket(owned)
            total += count * share * float(cost(lanes)(np.array([bucket]))[0])
    return total


@given(
    steps=STEPS,
    ranks=st.dictionaries(st.sampled_from([2, 3, 8]), st.integers(1, 5), min_size=1),
    sizes=st.sets(st.sampled_from([1, 4, 8, 10, 16, 24]), max_size=4),
    user=st.sets(st.sampled_from(range(3))),
    most=st.integers(1, 90),
    count=st.sampled_from([None, 2]),
    cost=st.sampled_from(sorted(COSTS)),
)
def test_no_grid_within_the_limit_costs_less(
    steps: dict[tuple[int, int], int],
    ranks: dict[int, int],
    sizes: set[int],
    user: set[int],
    most: int,
    count: int | None,
    cost: str,
) -> None:
    every = (*sorted(sizes), 32)
    pairs = [(s, r) for s in ((0, 3), (0, 1, 3), (2, 3)) for r in ((8,), (2, 4, 8))]
    entries = [ENTRIES[i] for i in sorted(user)]

    def replan(grid: Grid) -> Plan:
        return plan_of(grid, entries)

    grids = [
        Grid(tokens=(*tokens, 32), slots=slots, ranks=ranks_)
        for size in range(len(every) if count is None else min(count, len(every)))
        for tokens in itertools.combinations(every[:-1], size)
        for slots, ranks_ in pairs
    ]
    fitting = [grid for grid in grids if len(replan(grid).variants) <= most]
    edges = [e.max_tokens for e in entries if e.max_tokens]
    search = Search(mix_of(steps, ranks), replan, COSTS[cost], quantum=2, edges=edges)

    found = search.best(every, pairs, most=most, count=count)

    if found is None:
        assert not fitting
        return
    assert found.variants == len(replan(found.grid).variants) == search.count(found.grid) <= most
    assert found.grid in fitting
    least = min(cost_by_hand(steps, ranks, grid, COSTS[cost]) for grid in fitting)
    assert found.cost == pytest.approx(least, rel=1e-9)
    assert found.cost == pytest.approx(cost_by_hand(steps, ranks, found.grid, COSTS[cost]))
    assert search.as_is() <= found.cost * (1 + 1e-9)


def test_buckets_that_a_program_is_never_called_with_cost_less() -> None:
    """Positive control of `edges`: a search that does not know them takes each for the dearest."""
    entries = ENTRIES[:2]

    def replan(grid: Grid) -> Plan:
        return plan_of(grid, entries, with_lora=False)

    mix, pairs = mix_of({(t, 2): 1 for t in (8, 16, 24, 32)}, {8: 1}), [((0, 2), (8,))]
    # 2 programs x (base, 16 lanes) for the first two buckets, 1 x 2 for the other two
    most = 2 * 4 + 2 * 2
    searches = (Search(mix, replan, WORK, quantum=2, edges=edges) for edges in ([9], []))
    known, unknown = (search.best((8, 16, 24, 32), pairs, most=most) for search in searches)

    assert known is not None
    assert unknown is not None
    assert (known.grid.tokens, known.variants) == ((8, 16, 24, 32), most)
    assert len(unknown.grid.tokens) == 3


GRIDS = st.builds(
    Grid,
    tokens=st.sets(st.integers(1, 64), min_size=1, max_size=5).map(sorted).map(tuple),
    slots=st.sets(st.integers(0, 6), min_size=1, max_size=4).map(sorted).map(tuple),
    ranks=st.sets(st.sampled_from([2, 4, 8, 12]), min_size=1).map(sorted).map(tuple),
).filter(lambda grid: grid.slots[-1] > 0)


@given(grid=GRIDS, most=st.integers(0, 60))
def test_changes_fit_keep_what_is_promised_and_come_cheapest_first(grid: Grid, most: int) -> None:
    plan = plan_of(grid)
    search = Search(mix_of_points(plan, WORK), plan_of, WORK, quantum=2)
    found = changes(grid, search, most=most)

    assert bool(found) == (len(plan_of(smallest(grid)).variants) <= most)
    assert [choice.cost for choice in found] == sorted(choice.cost for choice in found)
    for choice in found:
        got = choice.grid
        assert len(plan_of(got).variants) == choice.variants <= most
        for axis in ("tokens", "slots", "ranks"):
            assert set(getattr(got, axis)) <= set(getattr(grid, axis))
            assert getattr(got, axis)[-1] == getattr(grid, axis)[-1]
        assert (0 in got.slots) == (0 in grid.slots)
        assert choice.cost >= search.cost_of(grid) * (1 - 1e-9)


@given(grid=GRIDS, low=st.integers(1, 60), more=st.integers(0, 60))
def test_a_higher_limit_never_costs_more(grid: Grid, low: int, more: int) -> None:
    search = Search(mix_of_points(plan_of(grid), WORK), plan_of, WORK, quantum=2)
    tight, loose = (changes(grid, search, most=most) for most in (low, low + more))

    assert not tight or loose[0].cost <= tight[0].cost * (1 + 1e-9)


def test_without_a_trace_equal_ratios_are_equally_dear() -> None:
    """Of powers of two, every second goes: absolute padding would only keep the largest."""
    grid = Grid(tokens=(2, 4, 8, 16, 32), slots=(1,), ranks=(8,))
    plan = plan_of(grid)
    search = Search(mix_of_points(plan, WORK), plan_of, WORK, quantum=2)
    found = search.best(grid.tokens, [(grid.slots, grid.ranks)], most=_of_buckets(grid, 3))

    assert found is not None
    assert found.grid.tokens == (2, 8, 32) or found.cost == pytest.approx(
        search.cost_of(Grid(tokens=(4, 16, 32), slots=(1,), ranks=(8,)))
    )


def _of_buckets(grid: Grid, count: int) -> int:
    last = grid.tokens[-count:]
    return len(plan_of(Grid(tokens=last, slots=grid.slots, ranks=grid.ranks)).variants)


def test_a_trace_says_which_buckets_may_go() -> None:
    grid = Grid(tokens=(2, 4, 8, 16, 32), slots=(0, 2), ranks=(8,))
    steps = Steps(
        tokens=np.array([2, 15, 2]),
        repeats=np.array([50, 9, 1]),
        slots=np.array([0, 2, 1]),
        late_seconds=0.0,
    )
    plan = plan_of(grid)
    search = Search(mix_of_steps(steps, plan), plan_of, WORK, quantum=2)
    found = changes(grid, search, most=_of_buckets(grid, 3))[0]

    assert found.grid.tokens == (2, 16, 32)
    assert found.cost == search.cost_of(grid)


def test_a_trace_without_adapters_takes_each_of_the_plans_slots_as_likely() -> None:
    steps = Steps(tokens=np.array([3, 5]), repeats=np.array([4, 2]), slots=None, late_seconds=0.0)
    mix = mix_of_steps(steps, plan_of(Grid(tokens=(8,), slots=(0, 4), ranks=(2, 8))))

    assert mix.slots.tolist() == [0, 4]
    assert mix.counts.tolist() == [[2, 2], [1, 1]]
    assert (mix.ranks.tolist(), mix.shares.tolist()) == ([2, 8], [0.5, 0.5])


def test_shares_of_owned_blocks() -> None:
    mix = mix_of({(1, 0): 1, (1, 2): 1}, {2: 3, 8: 1})

    # Two adapters own 1 + 1, 1 + 4 (twice) or 4 + 4 blocks of 2.
    none, two = mix.within(2)
    assert none.tolist() == [1.0] * 9
    assert np.diff(two).tolist() == [0, 9 / 16, 0, 0, 6 / 16, 0, 0, 1 / 16]


def test_the_roofline_of_lanes_reads_and_multiplies_their_banks() -> None:
    plan = plan_of(Grid(tokens=(8,), slots=(2,), ranks=(8,)))
    target = TargetSpec("tpu", "v6e:1x1")
    base, lanes = roofline(plan, target), roofline(plan, target, lanes=10)
    width = 2 * (8 + 8 + 8 + 4)

    assert lanes.flops_per_token - base.flops_per_token == 2 * 10 * width
    assert lanes.bytes_per_step - base.bytes_per_step == 2 * 10 * width
    assert lanes.bytes_per_token == base.bytes_per_token


# --- Limits --------------------------------------------------------------------------------------

CPU, TPU = TargetSpec("cpu"), TargetSpec("tpu", "v6e:1x1")


@given(
    most=st.integers(0, 400),
    kind=st.sampled_from(["variants", "seconds", "store_bytes"]),
    targets=st.sampled_from([(CPU,), (TPU,), (CPU, TPU)]),
    cores=st.integers(1, 9),
)
def test_the_most_variants_are_those_that_no_limit_refuses(
    most: int, kind: str, targets: tuple[TargetSpec, ...], cores: int
) -> None:
    limits = Limits(**{kind: getattr(bill(most, targets, cores=cores), kind)})
    found = most_variants(limits, targets, cores=cores, above=500)

    assert broken(bill(found, targets, cores=cores), limits) is None
    assert broken(bill(found + 1, targets, cores=cores), limits) == kind or found == 499
    assert found >= most  # seconds are rounded, so that a few more may be no dearer


def test_bills_are_for_all_targets_together() -> None:
    one, two, both = (bill(100, t, cores=2) for t in ((CPU,), (TPU,), (CPU, TPU)))

    assert both.variants == 200
    assert both.seconds == pytest.approx(one.seconds + two.seconds)
    assert both.store_bytes == one.store_bytes + two.store_bytes
    assert str(both).startswith("200 variants for 2 targets, about ")


def test_no_limit_is_never_broken() -> None:
    assert broken(bill(10**6, (CPU,), cores=1), Limits()) is None


# --- Large grids ---------------------------------------------------------------------------------


def test_of_many_buckets_one_chain_of_subsets_is_tried() -> None:
    axis = (0, 1, 2, 3, 4, 6, 8)
    every = subsets(axis, kept=frozenset({0}), limit=32)
    chain = subsets(axis, kept=frozenset({0}), limit=31)

    assert len(every) == 32
    assert every[0] == chain[0] == axis
    assert chain[-1] == (0, 8)
    assert [len(subset) for subset in chain] == [7, 6, 5, 4, 3, 2]
    assert set(chain) < set(every)


def test_a_long_axis_is_answered_by_a_step() -> None:
    grid = Grid(tokens=tuple(range(1, 1001)), slots=(2,), ranks=(8,))
    search = Search(mix_of_points(plan_of(grid), WORK), plan_of, WORK, quantum=2)
    limit = len(plan_of(Grid(tokens=(*range(8, 1000, 8), 1000), slots=(2,), ranks=(8,))).variants)
    found = changes(grid, search, most=limit)

    assert [choice.grid.tokens for choice in found] == [tuple(range(8, 1001, 8))]


@pytest.mark.parametrize("tokens", [60, 256, 700])
def test_a_large_grid_is_answered_in_seconds(tokens: int) -> None:
    grid = Grid(
        tokens=tuple(range(8, 8 * tokens + 1, 8)),
        slots=tuple(range(20)),
        ranks=tuple(range(2, 62, 4)),
    )
    search = Search(mix_of_points(plan_of(grid), WORK), plan_of, WORK, quantum=2)
    start = time.perf_counter()
    found = changes(grid, search, most=400)

    assert found
    assert all(len(plan_of(choice.grid).variants) <= 400 for choice in found)
    assert time.perf_counter() - start < 20


def test_a_search_that_never_ends_is_refused() -> None:
    grid = Grid(tokens=(2000,), slots=(2,), ranks=(8,))
    search = Search(mix_of_points(plan_of(grid), WORK), plan_of, WORK, quantum=2)
    pairs: Any = [(grid.slots, grid.ranks)] * 100
    with pytest.raises(PlanError) as caught:
        search.best(range(1, 2001), pairs, most=10**6)

    assert str(caught.value).startswith(
        "2,000 token buckets, up to 2,000 of them chosen, with 100 choices of slots and ranks are "
        "too many to search\n  expected: at most "
    )
    assert "next: ask for larger multiples" in str(caught.value)
