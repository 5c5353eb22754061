"""Laws of buckets: every length has one, padding is idempotent, more buckets never waste more."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.errors import OutOfPlanError, PlanError
from aot_lora.plan import Axis, gaps, mean_waste, pow2_buckets, step_buckets

LENGTHS = st.integers(min_value=1, max_value=20_000)
BUCKETS = st.sets(LENGTHS, min_size=1, max_size=12).map(lambda found: tuple(sorted(found)))


def tokens(buckets: tuple[int, ...]) -> Axis:
    return Axis(name="tokens", buckets=buckets)


@given(BUCKETS, st.data())
def test_every_length_has_the_smallest_bucket_that_holds_it(
    buckets: tuple[int, ...], data: st.DataObject
) -> None:
    length = data.draw(st.integers(min_value=1, max_value=buckets[-1]))

    assert tokens(buckets).bucket(length) == min(b for b in buckets if b >= length)


@given(BUCKETS, st.data())
def test_a_padded_length_is_its_own_bucket(buckets: tuple[int, ...], data: st.DataObject) -> None:
    axis = tokens(buckets)
    bucket = axis.bucket(data.draw(st.integers(min_value=1, max_value=buckets[-1])))

    assert axis.bucket(bucket) == bucket


@given(BUCKETS, st.data())
def test_one_more_bucket_never_wastes_more(buckets: tuple[int, ...], data: st.DataObject) -> None:
    lengths = st.integers(min_value=1, max_value=buckets[-1])
    length, added = data.draw(lengths), data.draw(lengths)
    finer = tokens(tuple(sorted({*buckets, added})))

    assert finer.bucket(length) <= tokens(buckets).bucket(length)


@given(BUCKETS)
def test_mean_waste_is_what_an_even_mix_of_lengths_pads(buckets: tuple[int, ...]) -> None:
    edges = zip((0, *buckets), buckets, strict=False)
    counted = [
        (upper, sum(upper - n for n in range(lower + 1, upper + 1)) / (upper * (upper - lower)))
        for lower, upper in edges
    ]

    assert mean_waste(tokens(buckets)) == tuple((b, pytest.approx(w)) for b, w in counted)


@given(smallest=LENGTHS, budget=LENGTHS)
def test_both_policies_make_a_valid_axis_that_ends_at_the_budget(
    smallest: int, budget: int
) -> None:
    for made in (
        pow2_buckets(smallest=smallest, budget=budget),
        step_buckets(step=smallest, budget=budget),
    ):
        assert tokens(made).buckets[-1] == budget


@pytest.mark.parametrize(
    ("budget", "below_pow2", "below_step"),
    [(317, 256, 256), (586, 512, 512), (2000, 1024, 1920), (16640, 16384, 16512)],
)
def test_a_budget_that_is_no_round_number_is_the_last_bucket(
    budget: int, below_pow2: int, below_step: int
) -> None:
    """CASES 20."""
    assert pow2_buckets(smallest=16, budget=budget)[-2:] == (below_pow2, budget)
    assert step_buckets(step=128, budget=budget)[-2:] == (below_step, budget)


@pytest.mark.parametrize("policy", [pow2_buckets(smallest=16, budget=2048), (64, 100, 199)])
def test_neighbours_at_most_twice_apart_are_no_gap(policy: tuple[int, ...]) -> None:
    assert gaps(tokens(policy)) == ()


def test_a_gap_says_its_worst_padding_and_a_bucket_to_add() -> None:
    """CASES 21."""
    (gap,) = gaps(tokens((64, 128, 256, 512, 1024, 2048, 4096, 8192, 49152)))

    assert gap == (8192, 49152, pytest.approx(0.83, abs=0.005), 16384)


@pytest.mark.parametrize("length", [-1, 129, 10**9])
def test_a_length_outside_the_plan_names_itself_and_the_nearest_bucket(length: int) -> None:
    with pytest.raises(OutOfPlanError) as caught:
        tokens((16, 128)).bucket(length)

    nearest = 128 if length > 0 else 16
    assert caught.value.found == f"{length}; the nearest bucket is {nearest}"


@pytest.mark.parametrize("buckets", [(), (2, 1), (1, 1), (-1, 1)])
def test_an_axis_that_is_no_axis_is_refused(buckets: tuple[int, ...]) -> None:
    with pytest.raises(PlanError, match="axis tokens has bad buckets"):
        tokens(buckets)
