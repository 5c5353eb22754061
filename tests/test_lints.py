"""Lints of a plan: true of every batch there can be, and of what a trace asks for."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from aot_lora.cli.main import run
from aot_lora.errors import EXIT_OK, EXIT_USAGE
from aot_lora.plan import Module, Plan, UserEntry, build_plan, round_up
from aot_lora.plan.fit import histogram, waste
from aot_lora.plan.lints import lane_lints, slot_lints, token_lints, token_uses


def plan_of(
    tokens: tuple[int, ...] = (1, 4, 8),
    slots: tuple[int, ...] = (1, 2, 4),
    ranks: tuple[int, ...] = (2, 8),
    resident_lanes: int = 32,
    quantum: int = 2,
    **more: Any,
) -> Plan:
    return build_plan(
        token_buckets=tokens,
        slots=slots,
        ranks=ranks,
        modules=(Module(name="q", d=16, o=16, layers=1),),
        layers=1,
        dtype="float32",
        quantum=quantum,
        max_adapters=more.get("max_adapters", 4),
        resident_lanes=round_up(resident_lanes, quantum),
        with_lora=True,
        user=(UserEntry(name="step", entry="engine:step", max_tokens=4),),
    )


def asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = EXIT_OK
) -> tuple[str, str]:
    assert run(["plan", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


# --- Lanes ---------------------------------------------------------------------------------------


@given(
    tokens=st.sets(st.integers(1, 6), min_size=1, max_size=3),
    slots=st.sets(st.integers(1, 4), min_size=1, max_size=3),
    ranks=st.sets(st.integers(1, 9), min_size=1, max_size=3),
    lanes=st.integers(9, 40),
    quantum=st.sampled_from([1, 2, 3]),
)
def test_what_is_called_unreachable_is_what_no_batch_reaches(
    tokens: set[int], slots: set[int], ranks: set[int], lanes: int, quantum: int
) -> None:
    plan = plan_of(
        tuple(sorted(tokens)),
        tuple(sorted(slots)),
        tuple(sorted(ranks)),
        resident_lanes=lanes,
        quantum=quantum,
    )
    capacity = (plan.bank_blocks - 1) * quantum
    top = plan.lanes.buckets[-1]
    sizes = range(quantum, plan.adapter_lanes.buckets[-1] + 1, quantum)
    batches = [  # every mix of adapters, in every bucket of tokens that has rows for them
        (bucket, mix)
        for bucket in plan.tokens.buckets
        for count in range(1, min(bucket, plan.max_adapters) + 1)
        for mix in itertools.combinations_with_replacement(sizes, count)
    ]
    # A user's program is looked up by any lanes, or by slots and rank: s of the same adapter.
    looked_up = {(t, plan.lanes.bucket(sum(mix))) for t, mix in batches if sum(mix) <= top}
    reached = {
        (t, plan.lanes.bucket(sum(mix))) for t, mix in batches if sum(mix) <= min(capacity, top)
    }
    unreachable = [
        v
        for v in plan.variants
        if v.lanes
        and v.tokens
        and not v.program.endswith("_single")
        and (v.tokens, v.lanes) not in (looked_up if v.program == "step" else reached)
    ]
    singles = {v.lanes for v in plan.variants if v.program.endswith("_single")}

    assert sum(lint.executables for lint in lane_lints(plan)) == len(unreachable)
    assert all(lanes <= sizes[-1] for lanes in singles)  # as one adapter has


def test_the_lints_of_lanes_say_why() -> None:
    found = lane_lints(plan_of(resident_lanes=12))

    assert [(lint.kind, lint.bucket, lint.tokens, lint.executables) for lint in found] == [
        ("unreachable", 32, None, 6),
        ("never_full", 16, None, 0),
        ("unreachable", 16, 1, 4),
    ]
    assert [lint.text for lint in found] == [
        "lanes 32: no batch reaches it, for the banks hold 12; 6 executables of LoRA programs",
        "lanes 16: no batch fills it, for the banks hold 12",
        "tokens 1 with lanes 16, 32: no batch reaches that, for each adapter has a row, "
        "so there are at most 8 lanes; 4 executables",
    ]


def test_a_plan_without_adapters_or_with_room_for_all_has_none() -> None:
    assert lane_lints(plan_of(slots=(0,))) == ()
    assert lane_lints(plan_of(tokens=(4, 8))) == ()


# --- Tokens --------------------------------------------------------------------------------------


@given(
    buckets=st.sets(st.integers(1, 63), max_size=5),
    steps=st.dictionaries(st.integers(1, 64), st.integers(1, 50), min_size=1, max_size=9),
)
def test_the_gain_of_a_bucket_is_the_waste_without_it(
    buckets: set[int], steps: dict[int, int]
) -> None:
    plan = plan_of((*sorted(buckets), 64))
    lengths, counts = histogram(list(steps), list(steps.values()))
    uses = token_uses(plan, lengths, counts)
    every = plan.tokens.buckets

    for use in uses[:-1]:
        without = tuple(bucket for bucket in every if bucket != use.bucket)
        assert use.gain == pytest.approx(
            waste(without, lengths, counts) - waste(every, lengths, counts), abs=1e-12
        )
    assert uses[-1].gain is None
    assert sum(use.share for use in uses) == pytest.approx(1)
    assert sum(use.padding for use in uses) == pytest.approx(1) or not waste(every, lengths, counts)
    assert sum(use.executables for use in uses) == sum(v.tokens > 0 for v in plan.variants)


def test_buckets_that_bring_nothing_or_little() -> None:
    plan = plan_of((2, 4, 8, 16))
    uses = token_uses(plan, np.array([2, 7, 8]), np.array([1, 1000, 1]))
    found = token_lints(uses, least=0.01)

    assert [(lint.kind, lint.bucket) for lint in found] == [
        ("little_gain", 2),
        ("never_hit", 4),
        ("never_hit", 16),
    ]
    assert found[0].text == (
        "tokens 2: without it the waste rises by 0.03 points, less than 1; "
        f"it takes {uses[0].executables} executables"
    )
    assert found[1].text.startswith("tokens 4: no step of the trace lands in it; without it ")
    assert found[2].text.startswith("tokens 16: no step comes near the budget; a lower one saves ")
    assert [lint.bucket for lint in token_lints(uses, least=0.0)] == [4, 16]
    assert [lint.bucket for lint in token_lints(uses, least=100.0)] == [2, 4, 8, 16]


def test_more_adapters_than_slots() -> None:
    plan = plan_of()

    assert slot_lints(plan, None) == slot_lints(plan, np.array([0, 4])) == ()
    (found,) = slot_lints(plan, np.array([1, 9, 2]))
    assert (found.kind, found.text) == (
        "beyond",
        "slots 4: steps of the trace have up to 9 adapters",
    )


# --- `aot-lora plan --traffic` -------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests a second apart: prompts of 20 to 60 tokens, adapters a, b, c."""
    path = tmp_path / "trace.csv"
    rows = (f"{at},{20 + 7 * at % 41},{5 + at % 9},{'abc'[at % 3]}\n" for at in range(40))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Adapter\n" + "".join(rows))
    return path


@pytest.fixture
def config(write_config: Callable[..., Path]) -> Path:
    return write_config(
        lora="{ranks: [8], slots: [1, 2], max_adapters: 2, resident_lanes: 8, dtype: float32}",
        tokens="{budget: 128, buckets: [1, 8, 16, 32, 64]}",
    )


def test_what_is_printed_for_people(
    config: Path,
    trace: Path,
    known_costs: None,
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    options = ["--traffic", str(trace), "--sequences", "8", "--worth", "2"]
    out, _ = asked([str(config), *options], capsys)
    lines = out.replace(f"{trace.parent}/", "").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith("trace.csv"))

    assert "\n".join(line.rstrip() for line in lines[start:]) == snapshot


def test_json_says_the_same(config: Path, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--traffic", str(trace), "--format", "json"]
    found: dict[str, Any] = json.loads(asked([str(config), *options], capsys)[0])

    assert (found["traffic"]["requests"], found["traffic"]["sequences"]) == (40, 128)
    uses = found["traffic"]["tokens"]
    assert sum(use["steps"] for use in uses) == found["traffic"]["steps"]
    assert [use["bucket_tokens"] for use in uses] == [1, 8, 16, 32, 64, 128]
    hit = {lint["bucket"] for lint in found["lints"] if lint["kind"] == "never_hit"}
    assert hit == {use["bucket_tokens"] for use in uses if not use["steps"]}
    assert {lint["kind"] for lint in found["lints"] if lint["axis"] == "lanes"} == {"unreachable"}


def test_without_a_trace_only_lanes_are_judged(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = asked([str(config), "--format", "json"], capsys)
    found: dict[str, Any] = json.loads(out)

    assert "traffic" not in found
    assert [lint["text"] for lint in found["lints"]] == [
        "lanes 16: no batch reaches it, for the banks hold 8; 18 executables of LoRA programs"
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--worth", "2"], "--worth needs a trace\n  next: name it with --traffic"),
        (["--sequences", "2"], "--sequences needs a trace"),
        (["--traffic", "none.csv"], "none.csv: cannot be read: No such file"),
        (["--traffic", "TRACE", "--worth", "nan"], "--worth is no share"),
        (["--traffic", "TRACE", "--worth", "-1"], "--worth is no share"),
        (["--traffic", "TRACE", "--sequences", "0"], "a budget of 128 tokens for 0 sequences"),
        (["--traffic", "TRACE", "--sequences", "129"], "a budget of 128 tokens for 129 sequences"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str],
    said: str,
    config: Path,
    trace: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given_options = [option.replace("TRACE", str(trace)) for option in options]
    out, err = asked([str(config), *given_options], capsys, EXIT_USAGE)

    assert out == ""
    assert f"aot-lora: {said}" in err
