"""`aot-lora fit --limit-...`: all axes together, exact against every grid, written and refused."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion
from test_grids import COSTS, MODULES, cost_by_hand, plan_of

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.errors import EXIT_OK, EXIT_USAGE, PlanError
from aot_lora.plan import build_plan
from aot_lora.plan.grids import Grid
from aot_lora.plan.product import Wanted, fit_grid, pow2_grid, slots_that_may_be
from aot_lora.plan.simulate import Steps

NOW = Grid(tokens=(4, 24), slots=(0, 2), ranks=(4, 8))


def steps_of(found: list[tuple[int, int, int]], *, named: bool = True) -> Steps:
    tokens, slots, repeats = (np.array(column) for column in zip(*found, strict=True))
    return Steps(tokens=tokens, repeats=repeats, slots=slots if named else None, late_seconds=0.0)


def wanted(**changed: Any) -> Wanted:
    asked: dict[str, Any] = {
        "plan": plan_of(NOW),
        "most": 60,
        "budget": 24,
        "count": None,
        "multiple": 4,
        "small": False,
        "slots": 3,
        "ranks": None,
    }
    return Wanted(**{**asked, **changed})


def subsets(values: set[int], most: int) -> list[tuple[int, ...]]:
    sizes = range(min(most, len(values)) + 1)
    return [chosen for size in sizes for chosen in itertools.combinations(sorted(values), size)]


@settings(max_examples=60)
@given(
    found=st.lists(
        st.tuples(st.integers(1, 24), st.integers(0, 3), st.integers(1, 9)), min_size=2, max_size=7
    ),
    ranks=st.dictionaries(st.sampled_from([2, 3, 8]), st.integers(1, 5), min_size=1),
    most=st.integers(5, 90),
    count=st.sampled_from([None, 3]),
    cost=st.sampled_from(sorted(COSTS)),
)
def test_no_grid_of_all_axes_within_the_limit_costs_less(
    found: list[tuple[int, int, int]],
    ranks: dict[int, int],
    most: int,
    count: int | None,
    cost: str,
) -> None:
    histogram = np.array(list(ranks)), np.array(list(ranks.values()))
    asked = wanted(most=most, count=count, ranks=histogram)
    steps = steps_of(found)
    counted: dict[tuple[int, int], int] = {}
    for tokens, slots, repeats in found:
        counted[tokens, slots] = counted.get((tokens, slots), 0) + repeats
    last = max(2, *(slots for _, slots, _ in found))
    tokens = {-(-t // 4) * 4 for t, _, _ in found} - {24}
    owned = {-(-r // 2) * 2 for r in ranks} - {8}
    grids = [
        Grid(tokens=(*t, 24), slots=(0, *s, last), ranks=(*r, 8))
        for t in subsets(tokens, 99 if count is None else count - 1)
        for s in subsets({slots for _, slots, _ in found} - {0, last}, asked.slots - 1)
        for r in subsets(owned, 99)
    ]
    fitting = [grid for grid in grids if len(plan_of(grid).variants) <= most]

    if not fitting:
        with pytest.raises(PlanError, match="no grid has at most"):
            fit_grid(steps, asked, plan_of, COSTS[cost], edges=[])
        return
    *_, best = fit_grid(steps, asked, plan_of, COSTS[cost], edges=[], others=[("now", NOW)])

    assert best.variants == len(plan_of(best.grid).variants) <= most
    assert best.grid in grids
    by_hand = {grid: cost_by_hand(counted, ranks, grid, COSTS[cost]) for grid in fitting}
    assert by_hand[best.grid] == pytest.approx(min(by_hand.values()), rel=1e-9)
    assert best.waste >= -1e-9


def test_a_trace_without_adapters_chooses_among_the_slots_and_ranks_of_the_plan() -> None:
    steps = steps_of([(5, 0, 3), (20, 0, 2), (9, 0, 1)], named=False)
    asked = wanted(
        plan=plan_of(Grid(tokens=(24,), slots=(0, 1, 2, 4), ranks=(2, 4, 8))), most=10**6
    )

    assert slots_that_may_be(steps, steps, asked) == [
        (0, 4), (0, 2, 4), (0, 1, 4), (0, 1, 2, 4),
    ]  # fmt: skip
    *_, loose = fit_grid(steps, asked, plan_of, COSTS["work"], edges=[])
    # Ranks of 4 fold into lanes that are there already: as dear without them, and smaller.
    assert (loose.grid.slots, loose.grid.ranks) == ((0, 1, 2, 4), (2, 8))
    assert loose.grid.tokens == (8, 12, 20, 24)


def test_no_limit_that_holds_means_no_padding_but_that_of_multiples() -> None:
    steps = steps_of([(4, 1, 3), (8, 2, 2), (24, 0, 1)])
    asked = wanted(most=10**6, ranks=(np.array([8]), np.array([1])))
    *_, best = fit_grid(steps, asked, plan_of, COSTS["work"], edges=[])

    assert best.grid == Grid(tokens=(4, 8, 24), slots=(0, 1, 2), ranks=(8,))
    assert best.waste == pytest.approx(0)


def test_overfitting_of_slots_shows_on_the_held_out_half() -> None:
    runs = [(8, 1 + at % 2, 1) for at in range(40)]  # halves of one adapter, and of two
    *_, best = fit_grid(steps_of(runs), wanted(most=10**6), plan_of, COSTS["work"], edges=[])

    assert best.waste < 0.2  # each adapter of rank 4 or 8
    assert best.held_out == pytest.approx(best.waste, abs=0.2)


def test_the_grid_of_powers_of_two() -> None:
    found = pow2_grid(wanted(), last=5)

    assert found == Grid(tokens=(4, 8, 16, 24), slots=(0, 1, 2, 4, 5), ranks=(4, 8))


@pytest.mark.parametrize(
    ("changed", "runs", "said"),
    [
        ({"slots": 0}, [(4, 1, 1), (4, 2, 1)], "no slots buckets were asked for"),
        ({}, [(4, 1, 1)], "the trace makes a single run of equal steps"),
        ({}, [(4, 9, 1), (4, 2, 1)], "steps of the trace have up to 9 adapters"),
        ({"multiple": 0}, [(4, 1, 1), (4, 2, 1)], "buckets cannot be multiples of 0"),
        ({"budget": 3}, [(3, 1, 1), (2, 2, 1)], "the budget 3 is below the smallest bucket 4"),
        ({"most": 3}, [(4, 1, 1), (4, 2, 1)], "no grid has at most 3 variants"),
        (
            {"ranks": (np.arange(1, 40), np.ones(39))},
            [(4, 1, 1), (4, 2, 1)],
            "adapters of 20 different ranks are too many",
        ),
    ],
)
def test_what_cannot_be_fitted_is_said(
    changed: dict[str, Any], runs: list[tuple[int, int, int]], said: str
) -> None:
    with pytest.raises(PlanError) as caught:
        fit_grid(steps_of(runs), wanted(**changed), plan_of, COSTS["work"], edges=[])

    assert str(caught.value).startswith(said)
    assert caught.value.expected


def test_too_many_numbers_of_adapters_are_refused() -> None:
    plan = build_plan(
        token_buckets=(8,), slots=(64,), ranks=(8,), modules=MODULES, layers=2, dtype="float32",
        quantum=8, max_adapters=64, resident_lanes=512, with_lora=True, user=(),
    )  # fmt: skip
    runs = steps_of([(4, slots, 1) for slots in range(1, 65)])
    with pytest.raises(PlanError, match="up to 8 of 64 numbers of adapters are too many choices"):
        slots_that_may_be(runs, runs, wanted(plan=plan, slots=8))


# --- The command line ----------------------------------------------------------------------------

CONFIG = """\
model: {q_proj: [16, 16], k_proj: [16, 8]}
target: {platform: cpu}
lora:
  ranks: [8, 16, 32]    # guessed
  slots: [0, 1, 2, 4]   # active
  max_adapters: 4
tokens: {budget: 64, buckets: pow2, smallest: 8}   # of a step
"""
pytestmark = pytest.mark.usefixtures("known_costs")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of 60 requests of three adapters and none, ranks, and a config."""
    monkeypatch.setattr("aot_lora.cli.grids.usable_cores", lambda: 4)
    monkeypatch.chdir(tmp_path)
    rows = (
        f"{at / 4},{9 + 7 * at % 41},{3 + at % 9},{('a', 'b', '', 'c', 'a')[at % 5]}\n"
        for at in range(60)
    )
    trace = "TIMESTAMP,ContextTokens,GeneratedTokens,Adapter\n" + "".join(rows)
    (tmp_path / "trace.csv").write_text(trace)
    (tmp_path / "ranks.csv").write_text("rank,count\n8,30\n12,9\n32,1\n")
    (tmp_path / "c.yaml").write_text(CONFIG)
    return tmp_path


def asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = EXIT_OK
) -> tuple[str, str]:
    base = ["fit", "trace.csv", "--config", "c.yaml", "--sequences", "8", "--multiple", "8"]
    assert run([*base, "--step-ms", "200", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


OPTIONS = {
    "variants": ["--limit-variants", "60"],
    "seconds, with ranks": ["--limit-seconds", "20", "--ranks", "ranks.csv"],
    "bytes, few of each": ["--limit-bytes", "50MiB", "--count", "3", "--slots", "2"],
}


@pytest.mark.parametrize("case", OPTIONS)
def test_what_is_printed_for_people(
    case: str, files: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    out, err = asked(OPTIONS[case], capsys)

    assert out == snapshot
    assert err == ""
    assert (files / "c.yaml").read_text() == CONFIG


@pytest.mark.parametrize("case", OPTIONS)
def test_what_is_written_is_what_is_printed_and_keeps_the_comments(
    case: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = asked([*OPTIONS[case], "--write", "--format", "json"], capsys)
    found: dict[str, Any] = json.loads(out)
    text = (files / "c.yaml").read_text()
    config = load_config("c.yaml")

    assert err.startswith(f"wrote {len(found['buckets'])} token ")
    assert list(config.plan.tokens.buckets) == found["buckets"] == found["grids"][-1]["tokens"]
    assert (list(config.plan.slots), list(config.plan.ranks)) == (found["slots"], found["ranks"])
    assert len(config.plan.variants) == found["grids"][-1]["variants"] <= found["most_variants"]
    assert config.plan.quantum == 8
    for comment in ("# guessed", "# active", "# of a step"):
        assert comment in text
    same = {key: value for key, value in yaml.safe_load(CONFIG).items() if key not in
            ("lora", "tokens")}  # fmt: skip
    assert same.items() <= yaml.safe_load(text).items()


def test_the_limits_of_the_config_hold_as_well_and_one_above_them_may_be_mended(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "c.yaml").write_text(CONFIG + "limits: {variants: 40, seconds: 30}\n")
    assert run(["plan", "c.yaml"]) == EXIT_USAGE
    capsys.readouterr()
    out, _ = asked(["--limit-variants", "500", "--write", "--format", "json"], capsys)

    assert json.loads(out)["most_variants"] == 40
    assert run(["plan", "c.yaml"]) == EXIT_OK


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit-variants", "3"], "nothing fits 3 variants, 8.0 GiB\n  expected: at least 7: "),
        (["--limit-seconds", "0.5"], "nothing fits 2,000 variants, 0.5 s, 8.0 GiB\n"),
        (["--limit-bytes", "1"], "nothing fits 2,000 variants, 1 B\n"),
        (["--limit-bytes", "5MB"], "bad size: expected bytes as an integer, or as in 512MiB"),
        (["--limit-bytes", "0"], "a size of nothing"),
        (["--limit-variants", "50", "--slots", "0"], "no slots buckets were asked for"),
        (["--limit-variants", "50", "--of", "prompts"], "a --limit for whole prompts"),
        (["--limit-variants", "50", "--ranks", "none.csv"], ""),
        (["--limit-variants", "0"], ""),
        (["--limit-seconds", "nan"], "a warmup of no time, or without an end"),
        (["--limit-seconds", "-1"], ""),
    ],
)
def test_bad_limits_are_refused(
    options: list[str], said: str, files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = asked([*options, "--write"], capsys, EXIT_USAGE)

    assert out == ""
    assert f"aot-lora: {said}" in err or not said
    assert (files / "c.yaml").read_text() == CONFIG


def test_a_limit_needs_a_config(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fit", "trace.csv", "--limit-variants", "9"]) == EXIT_USAGE
    assert "a --limit needs a config" in capsys.readouterr().err
    assert files


def test_a_config_that_does_not_hold_the_trace_is_not_compared(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (files / "c.yaml").write_text(CONFIG.replace("[0, 1, 2, 4]", "[1]"))
    (files / "ranks.csv").write_text("rank,count\n40,1\n")
    options = ["--limit-variants", "60", "--ranks", "ranks.csv", "--format", "json"]
    out, err = asked(options, capsys)

    assert [grid["name"] for grid in json.loads(out)["grids"]] == ["pow2", "fit"]
    assert err == (
        "warning: of c.yaml the slots end at 1, below 3, the ranks end at 32, below 40: it is not "
        "compared\n"
    )


# --- Writing the axes one by one -----------------------------------------------------------------


def test_slots_are_written_with_the_tokens(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = asked(["--slots", "2", "--count", "4", "--write", "--format", "json"], capsys)
    found = json.loads(out)

    assert err == "wrote 4 token and 3 slots buckets into " + str(files / "c.yaml") + "\n"
    plan = load_config("c.yaml").plan
    assert list(plan.slots) == [0, *found["slots"]]  # no step of the trace has no adapter


def test_ranks_are_written_with_their_quantum(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["fit", "--ranks", "ranks.csv", "--count", "2", "--multiple", "4"]
    assert run([*options, "--config", "c.yaml", "--write", "--format", "json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    text = (files / "c.yaml").read_text()

    assert f"  ranks: {found['ranks']}    # guessed\n  quantum: {found['quantum']}\n" in text
    assert load_config("c.yaml").plan.quantum == found["quantum"] == 4
    assert run([*options, "--write"]) == EXIT_USAGE
    assert "--write needs a config" in capsys.readouterr().err


def test_a_fit_is_under_its_limit_where_steps_cost_more(
    files: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot_lora.plan.cost._PER_STEP", {"cpu": (30.0, 2**24)})
    (files / "c.yaml").write_text(CONFIG + "programs: [lora, {entry: 'engine:step'}]\n")
    fits = [
        json.loads(asked(["--limit-seconds", str(limit), "--format", "json"], capsys)[0])
        for limit in range(60, 160, 20)
    ]

    for limit, found in zip(range(60, 160, 20), fits, strict=True):
        assert found["grids"][-1]["seconds"] <= limit
        assert found["grids"][-1]["variants"] <= found["most_variants"]
    assert fits[0]["grids"][-1]["variants"] < fits[-1]["grids"][-1]["variants"]
