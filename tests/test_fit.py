"""The fit: exact against every choice of buckets, lawful, and clear about what cannot be."""

import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.errors import PlanError
from aot_lora.plan import Module, TargetSpec, build_plan
from aot_lora.plan.chips import PEAKS, roofline
from aot_lora.plan.compare import Lengths, compare, lengths_of
from aot_lora.plan.fit import (
    Cost,
    Roofline,
    _chain,
    _lower_hull,
    excess,
    fit,
    histogram,
    padded_tokens,
    usage,
    waste,
)
from aot_lora.plan.simulate import Server, Traffic

ROOF = Roofline(
    flops_per_token=2.0, bytes_per_step=70.0, flops_per_second=3.0, bytes_per_second=7.0
)
FLAT: Cost = lambda buckets: np.ones_like(buckets)  # noqa: E731
COSTS = [padded_tokens, ROOF, FLAT, lambda buckets: buckets**2]

TRAFFIC = st.dictionaries(st.integers(1, 64), st.integers(1, 50), min_size=1, max_size=9)


def arrays(found: dict[int, int]) -> tuple[Any, Any]:
    lengths = sorted(found)
    return np.array(lengths), np.array([found[length] for length in lengths])


def total(buckets: tuple[int, ...], lengths: Any, counts: Any, cost: Cost) -> float:
    used = usage(buckets, lengths, counts)
    return float(sum(u.steps * float(cost(np.array([u.bucket]))[0]) for u in used))


# --- The optimum ---------------------------------------------------------------------------------


@given(
    found=TRAFFIC,
    count=st.integers(1, 5),
    multiple=st.sampled_from([1, 8, 16, 24]),
    small=st.booleans(),
    cost=st.sampled_from(COSTS),
)
def test_no_choice_of_buckets_costs_less(
    found: dict[int, int], count: int, multiple: int, small: bool, cost: Cost
) -> None:
    lengths, counts = arrays(found)
    budget = 70  # no multiple of any
    allowed = {n for n in range(1, budget) if n % multiple == 0}
    allowed |= {n for n in (1, 2, 4, 8, 16) if n < multiple} if small else set()
    # Only sizes that some length rounds up to can matter.
    tight = {min((a for a in allowed if a >= length), default=budget) for length in lengths}
    least = min(
        total((*sorted(chosen), budget), lengths, counts, cost)
        for size in range(count)
        for chosen in itertools.combinations(tight - {budget}, size)
    )

    buckets = fit(
        lengths, counts, count=count, multiple=multiple, budget=budget, small=small, cost=cost
    )

    assert buckets[-1] == budget
    assert len(buckets) <= count
    assert set(buckets[:-1]) <= allowed
    assert total(buckets, lengths, counts, cost) == pytest.approx(least)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("cost", COSTS)
def test_many_lengths_are_fitted_as_a_table_of_all_choices_does(seed: int, cost: Cost) -> None:
    random = np.random.default_rng(seed)
    size = int(random.integers(50, 400))
    lengths = np.unique(random.integers(1, 2000, size)) if seed % 2 else np.arange(1, size)
    counts = random.geometric(random.choice([0.5, 0.01, 0.0001]), len(lengths))
    count = int(random.integers(2, 20))
    before = np.concatenate(([0], np.cumsum(counts)))
    # row j: the cost of lengths i .. j in a bucket of length j
    spans = (before[1:, None] - before[None, :-1]) * np.asarray(cost(lengths), float)[:, None]
    spans[np.triu_indices(len(lengths), 1)] = np.inf
    best = spans[:, 0]
    for _ in range(count - 1):
        starts = np.concatenate(([0.0], best[:-1]))
        best = np.minimum(best, (spans + starts[None, :]).min(axis=1))
    budget = int(lengths[-1])

    found = fit(lengths, counts, count=count, multiple=1, budget=budget, cost=cost)

    assert total(found, lengths, counts, cost) == pytest.approx(best[-1], rel=1e-12)


@given(found=TRAFFIC, multiple=st.sampled_from([1, 8]))
def test_more_buckets_never_waste_more(found: dict[int, int], multiple: int) -> None:
    lengths, counts = arrays(found)
    wastes = [
        waste(fit(lengths, counts, count=count, multiple=multiple, budget=64), lengths, counts)
        for count in range(1, 10)
    ]

    assert wastes == sorted(wastes, reverse=True)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(-50, 50)), min_size=1, max_size=80))
def test_the_hull_is_the_one_made_point_by_point(steps: list[tuple[int, int]]) -> None:
    x = np.cumsum([step for step, _ in steps]).astype(float)
    y = np.array([height for _, height in steps], float)

    assert _lower_hull(x, y).tolist() == _chain(x.tolist(), y.tolist())


def test_a_hull_that_thins_out_slowly_is_finished_point_by_point() -> None:
    x = np.arange(200.0)
    y = np.where(x < 199, x**2, -1e6)  # each round finds only the last of them

    assert _lower_hull(x, y).tolist() == [0, 199]


def test_a_length_that_never_occurs_gets_no_bucket() -> None:
    lengths, counts = np.array([10, 20, 30]), np.array([5, 0, 5])

    assert fit(lengths, counts, count=9, multiple=1, budget=64) == (10, 30, 64)


def test_the_roofline_does_not_pay_for_buckets_below_its_ridge() -> None:
    lengths, counts = histogram([1] * 90 + [10] * 90 + [40] * 10 + [60] * 5)

    assert fit(lengths, counts, count=3, multiple=1, budget=64) == (1, 10, 64)
    found = fit(lengths, counts, count=3, multiple=1, budget=64, cost=ROOF)
    assert found[-2:] == (40, 64)
    assert excess(found, lengths, counts, cost=ROOF) < excess(
        (1, 10, 64), lengths, counts, cost=ROOF
    )
    assert excess(found, lengths, counts, cost=padded_tokens) == waste(found, lengths, counts)
    assert ROOF(np.array([1, 15, 64])).tolist() == [10.0, 10.0, pytest.approx(128 / 3)]


def test_the_roofline_of_a_plan_counts_its_weights_on_one_device() -> None:
    plan = build_plan(
        token_buckets=(16,),
        slots=(1,),
        ranks=(8,),
        modules=(Module(name="q", d=64, o=32, layers=3),),
        tp=2,
        layers=3,
        dtype="bfloat16",
        quantum=8,
        max_adapters=1,
        resident_lanes=8,
        with_lora=True,
        user=(),
    )
    found = roofline(plan, TargetSpec("tpu", "v6e:1x2", 2))

    assert found.flops_per_token == 2 * 64 * 32 * 3 / 2
    assert found.bytes_per_step == 2 * 64 * 32 * 3 / 2
    assert found.bytes_per_token == 2 * (64 + 32) * 3 / 2
    assert (found.flops_per_second, found.bytes_per_second) == PEAKS["v6e"]
    with pytest.raises(PlanError, match="no roofline is known for cpu"):
        roofline(plan, TargetSpec("cpu"))


# --- What is compared ----------------------------------------------------------------------------


def test_the_waste_of_each_bucket_adds_up() -> None:
    lengths, counts = histogram([3, 8, 8, 9, 16])
    first, second, third = usage((8, 16, 32), lengths, counts)

    assert (first.steps, first.real, first.waste) == (3, 19, pytest.approx(24 / 19 - 1))
    assert (second.steps, second.real, second.waste) == (2, 25, pytest.approx(32 / 25 - 1))
    assert (third.steps, third.real, third.waste) == (0, 0, 0.0)
    assert waste((8, 16, 32), lengths, counts) == pytest.approx(56 / 44 - 1)


def test_halves_share_nothing_and_lose_nothing() -> None:
    lengths = Lengths(values=np.array([1, 2, 3, 4, 5]), repeats=np.array([1, 1, 1, 1, 4]))

    def halves(later: bool) -> list[list[int]]:
        return [half.values.tolist() for half in lengths.halves(later=later)]

    assert halves(later=False) == [[1, 3, 5], [2, 4]]
    assert halves(later=True) == [[1, 2, 3, 4], [5]]


def test_overfitting_shows_on_the_held_out_half() -> None:
    # Every second request is of a size that the others never have.
    values = np.array([100, 201] * 50)
    lengths = Lengths(values=values, repeats=np.ones_like(values))
    *_, found = compare(lengths, count=3, multiple=1, budget=1000)

    assert found.buckets == (100, 201, 1000)
    assert (found.waste, found.later) == (0.0, 0.0)
    assert found.held_out == pytest.approx(1000 / 201 - 1)


def test_the_policies_and_their_order() -> None:
    lengths = Lengths(values=np.array([5, 90, 33]), repeats=np.array([1, 2, 3]))
    found = compare(lengths, count=3, multiple=8, budget=100, current=(50, 100))

    assert [(p.name, p.buckets) for p in found] == [
        ("pow2", (8, 16, 32, 64, 100)),
        ("step 40", (40, 80, 100)),
        ("current", (50, 100)),
        ("fit 3", (8, 40, 100)),
    ]
    assert len(compare(lengths, count=3, multiple=8, budget=100)) == 3


def test_prompts_are_clipped_to_the_budget() -> None:
    traffic = Traffic(
        prompts=np.array([5, 500]), outputs=np.array([1, 1]), seconds=np.array([0.0, 0.0])
    )
    lengths, steps = lengths_of(traffic, of="prompts", server=Server(budget=64))

    assert (lengths.values.tolist(), steps) == ([5, 64], None)


# --- What cannot be ------------------------------------------------------------------------------

GOOD: dict[str, Any] = {
    "lengths": np.array([1, 40]),
    "counts": np.array([1, 1]),
    "count": 2,
    "multiple": 16,
    "budget": 64,
}


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"count": 10_001},
            "10,001 buckets were asked for\n  expected: a count of at most 10,000",
        ),
        ({"budget": 2**31}, "a budget of 2,147,483,648\n  expected: at most 2,147,483,647"),
        ({"count": 0}, "no buckets were asked for\n  expected: a count of at least 1"),
        ({"multiple": 0}, "buckets cannot be multiples of 0\n  expected: for instance 8 or 16"),
        (
            {"budget": 15},
            "the budget 15 is below the smallest bucket 16\n"
            "  expected: a budget of at least 16, or multiples of at most 15",
        ),
        (
            {"budget": 0},
            "the budget 0 is below the smallest bucket 16\n  expected: a budget of at least 16",
        ),
        (
            {"lengths": np.array([], int), "counts": np.array([], int)},
            "there are no lengths to fit\n  expected: at least one",
        ),
        ({"counts": np.array([-1, 2])}, "a length occurs less than never\n  found: -1"),
        (
            {"lengths": np.array([-3, 40])},
            "a length is outside the budget\n  expected: 1 to 64\n  found: -3\n"
            "  next: clip the lengths, or raise the budget",
        ),
        (
            {"lengths": np.array([1, 65])},
            "a length is outside the budget\n  expected: 1 to 64\n  found: 65\n"
            "  next: clip the lengths, or raise the budget",
        ),
        (
            {"cost": lambda buckets: -buckets, "count": 1},
            "the cost of a step falls as its bucket grows, or is no cost\n"
            "  expected: finite numbers from 0 that never fall\n"
            "  found: [-16.0, -48.0, -64.0] ... -64.0 for [16, 48, 64] ... 64",
        ),
    ],
)
def test_what_cannot_be_fitted_says_what_could(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        fit(**{**GOOD, **changed})

    assert str(caught.value) == text


def test_too_large_a_search_says_what_would_fit() -> None:
    lengths = np.arange(1, 1_000_001)
    ask: Callable[..., Any] = lambda **asked: fit(  # noqa: E731
        lengths, np.ones_like(lengths), **{"budget": 1_000_000, **asked}
    )

    with pytest.raises(PlanError) as caught:
        ask(count=100, multiple=1)

    assert str(caught.value) == (
        "1,000,000 distinct lengths in 100 buckets are too many to search\n"
        "  expected: at most 50,000,000 lengths times buckets\n"
        "  found: 100,000,000\n"
        "  next: ask for at most 50 buckets, or for multiples of 2"
    )
    assert len(ask(count=100, multiple=2)) == 100


def test_a_million_distinct_lengths_are_fitted_in_seconds() -> None:
    lengths = np.arange(1, 1_000_001)
    start = time.perf_counter()
    found = fit(lengths, np.ones_like(lengths), count=10, multiple=1, budget=1_000_000)

    assert found == tuple(range(100_000, 1_000_001, 100_000))
    assert time.perf_counter() - start < 10


def test_the_waste_of_buckets_that_hold_too_little_is_refused() -> None:
    with pytest.raises(PlanError, match="a length is above the last bucket"):
        waste((8,), np.array([9]), np.array([1]))


def test_a_single_step_cannot_be_halved() -> None:
    one = Lengths(values=np.array([4]), repeats=np.array([9]))

    with pytest.raises(PlanError, match="a single step or run of equal ones"):
        compare(one, count=1, multiple=1, budget=8)
