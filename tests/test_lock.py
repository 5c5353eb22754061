"""The lock: what it is compared with, how it is written, and what is wrong with a bad one."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from syrupy.assertion import SnapshotAssertion

from aot_lora.cli.main import run
from aot_lora.errors import EXIT_CHECK, EXIT_OK, EXIT_USAGE, AotLoraError
from aot_lora.lowering.compare import CODE, compare, groups
from aot_lora.lowering.lock import AROUND, FORMAT, Lock, LockLine, dump_lock, read_lock

ONE = LockLine(fingerprint="1", signature="x: f32[4] -> f32[4]")
MOVED = LockLine(fingerprint="2", signature="x: f32[4] -> f32[4]")
RESHAPED = LockLine(fingerprint="2", signature="x: f32[5] -> f32[5]")

LINES = st.builds(LockLine, fingerprint=st.text(max_size=4), signature=st.text(max_size=20))
TRACES = st.dictionaries(
    st.sampled_from(["cpu", "cuda", "tpu"]), st.dictionaries(st.text(max_size=6), LINES, max_size=5)
)


def lock_of(traces: dict[str, dict[str, LockLine]], *, plan: str = "plan") -> Lock:
    return Lock(format=FORMAT, plan=plan, traces=traces)


@given(TRACES, st.randoms(use_true_random=False))
def test_what_is_written_is_read_again_whatever_the_order(
    traces: dict[str, dict[str, LockLine]], order: random.Random
) -> None:
    platforms = list(traces.items())
    order.shuffle(platforms)
    shuffled = {name: dict(order.sample(list(t.items()), len(t))) for name, t in platforms}
    text = dump_lock(traces, plan="plan")

    assert dump_lock(shuffled, plan="plan") == text
    lock = Lock.model_validate(json.loads(text))
    assert lock.traces == traces
    assert compare(lock, shuffled, plan="plan").holds


def test_a_lock_has_one_line_for_each_variant(snapshot: SnapshotAssertion) -> None:
    traces = {"tpu": {"b/t1": MOVED, "a/t1": ONE}, "cpu": {"a/t1": ONE}}

    assert dump_lock(traces, plan="plan") == snapshot


def test_neither_backend_answers_for_the_others_traces() -> None:
    lock = lock_of({"cpu": {"a": ONE}, "torch_xla cpu": {"a": MOVED}})

    assert lock.of(torch_xla=True).traces == {"torch_xla cpu": {"a": MOVED}}
    assert compare(lock.of(torch_xla=False), {"cpu": {"a": ONE}}, plan="plan").holds
    assert not compare(lock, {"cpu": {"a": ONE}}, plan="plan").holds


@pytest.mark.parametrize(
    ("now", "plan", "expected"),
    [
        ({"cpu": {"a": ONE, "b": ONE}}, "plan", {"stable": ("cpu a", "cpu b")}),
        ({"cpu": {"a": ONE}}, "other", {"stable": ("cpu a",), "stale": ("cpu b",)}),
        ({"cpu": {"a": ONE, "b": ONE, "c": ONE}}, "plan", {"missing": ("cpu c",)}),
        ({"cpu": {"a": ONE, "b": ONE, "c": ONE}}, "other", {"new": ("cpu c",)}),
        ({"tpu": {"a": ONE}}, "other", {"new": ("tpu a",), "stale": ("cpu a", "cpu b")}),
    ],
)
def test_a_variant_is_stable_missing_new_or_stale(
    now: dict[str, dict[str, LockLine]], plan: str, expected: dict[str, tuple[str, ...]]
) -> None:
    found = compare(lock_of({"cpu": {"a": ONE, "b": ONE}}), now, plan=plan)

    assert {kind: getattr(found, kind) for kind in expected} == expected
    assert found.holds == (set(expected) == {"stable"})
    assert found.moved == ()


def test_a_moved_variant_says_whether_its_code_or_its_signature_moved(
    snapshot: SnapshotAssertion,
) -> None:
    """CASES 29 and 30."""
    now = {"cpu": {"a": MOVED, "b": RESHAPED, "c": ONE}}
    found = compare(lock_of({"cpu": {"a": ONE, "b": ONE, "c": ONE}}), now, plan="plan")

    assert not found.holds
    assert found.stable == ("cpu c",)
    assert {moved.name: moved.cause for moved in found.moved} == snapshot


# --- `aot-lora check` on a lock of its own -------------------------------------------------------


@pytest.fixture
def locked(tiny_config: Path) -> Path:
    """The tiny config with its lock written."""
    assert run(["check", str(tiny_config), "--update"]) == EXIT_OK
    return tiny_config


def counts(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, int], str]:
    captured = capsys.readouterr()
    return json.loads(captured.out.splitlines()[-1]), captured.err


def test_an_unchanged_plan_holds_and_is_written_as_it_was(
    locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = locked.with_suffix(".lock.json")
    before = path.read_text()
    capsys.readouterr()

    assert run(["check", str(locked), "--format", "json"]) == EXIT_OK
    found, err = counts(capsys)
    assert found == {"variants": 13, "stable": 13, "moved": 0, "missing": 0, "stale": 0, "new": 0}
    assert err == ""
    assert run(["check", str(locked), "--update"]) == EXIT_OK
    assert path.read_text() == before


# Edits of a lock -> what `check` finds. Without them a check that always passes would pass.
EDITS: dict[str, Callable[[str], str]] = {
    "missing": lambda line: "",
    "moved": lambda line: line.replace('"fingerprint": "', '"fingerprint": "0'),
    "stale": lambda line: line + line.replace("bank_reset", "bank_gone"),
}


@pytest.mark.parametrize("kind", EDITS)
def test_one_changed_line_fails_the_check_and_is_named(
    kind: str, locked: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = locked.with_suffix(".lock.json")
    lines = path.read_text().splitlines(keepends=True)
    (at,) = (i for i, text in enumerate(lines) if "bank_reset/l8-d16-o16" in text)
    lines[at] = EDITS[kind](lines[at])
    path.write_text("".join(lines))
    capsys.readouterr()

    assert run(["check", str(locked), "--format", "json"]) == EXIT_CHECK
    found, err = counts(capsys)
    assert found[kind] == 1
    assert found["stable"] == (13 if kind == "stale" else 12)
    assert f"{kind} cpu bank_{'gone' if kind == 'stale' else 'reset'}/l8-d16-o16" in err
    assert "aot-lora check --update" in err


def test_a_plan_that_grew_names_what_is_new_and_what_is_stale(
    locked: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    grown = write_config(tokens="{budget: 16, buckets: [16]}")
    capsys.readouterr()

    assert run(["check", str(grown), "--format", "json"]) == EXIT_CHECK
    found, err = counts(capsys)
    assert found == {"variants": 13, "stable": 4, "moved": 0, "missing": 0, "stale": 9, "new": 9}
    assert "new cpu lora_shrink/t16-l8-d16" in err
    assert "and 1 more of lora_shrink" in err


def test_a_lock_is_left_as_it_was_where_a_variant_cannot_be_traced(
    locked: Path,
    write_config: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = locked.with_suffix(".lock.json").read_text()
    (tmp_path / "broken_for_the_lock.py").write_text("def step(point, context): return 1")
    broken = write_config(programs="[lora, {entry: 'broken_for_the_lock:step'}]")

    assert run(["check", str(broken), "--update"]) == EXIT_USAGE
    assert run(["check", str(broken)]) == EXIT_CHECK
    assert locked.with_suffix(".lock.json").read_text() == before


GOOD = dump_lock({"cpu": {"a": ONE}}, plan="plan")
BAD = {
    "absent": None,
    "empty": "",
    "broken": GOOD[:-9],
    "conflict": GOOD.replace('   "a"', '<<<<<<< ours\n   "a"'),
    "newer": GOOD.replace(f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
    "older": GOOD.replace(f'"format": {FORMAT}', f'"format": {FORMAT - 1}'),
    "a line twice": GOOD.replace(
        '   "a": {', '   "a": {"fingerprint": "0", "signature": ""},\n   "a": {'
    ),
    "a list": "[]",
    "without a plan": GOOD.replace('"plan": "plan",', ""),
    "unknown field": GOOD.replace('"fingerprint"', '"finger": "", "fingerprint"'),
    "wrong type": GOOD.replace('"fingerprint": "1"', '"fingerprint": 1'),
    "not UTF-8": "\udcff",
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_lock_says_what_is_wrong_with_it(
    case: str, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    path = tmp_path / "x.lock.json"
    text = BAD[case]
    if text is not None:
        path.write_text(text, errors="surrogateescape")

    with pytest.raises(AotLoraError) as caught:
        read_lock(path)

    assert caught.value.exit_code == (EXIT_CHECK if text is None else EXIT_USAGE)
    assert str(caught.value).replace(f"{tmp_path}/", "") == snapshot


def test_the_base_of_the_bad_locks_is_good(tmp_path: Path) -> None:
    (tmp_path / "x.lock.json").write_text(GOOD)

    assert read_lock(tmp_path / "x.lock.json").traces == {"cpu": {"a": ONE}}


def test_lines_beside_hold_under_their_release_of_jax_only(tmp_path: Path) -> None:
    path = tmp_path / "x.lock.json"
    own = {"0.12": {"cpu": {"b": MOVED}}}
    text = dump_lock({"cpu": {"a": ONE, "b": ONE}}, plan="plan", jax="0.10.2", beside=own)
    path.write_text(text)
    lock = read_lock(path)

    now = {"cpu": {"a": ONE, "b": MOVED}}
    assert compare(lock, now, plan="plan", jax="0.12.0.1").holds
    found = compare(lock, now, plan="plan", jax="0.11.2")
    assert [moved.name for moved in found.moved] == ["cpu b"]
    (group,) = groups(found)
    assert group.cause == f"toolchain: jax 0.10.2 -> 0.11.2; {CODE}"


def test_changed_options_are_a_cause_of_whatever_moved() -> None:
    lock = Lock(format=FORMAT, plan="plan", options="JAX_A=1 JAX_B=2", traces={"cpu": {"a": ONE}})
    moved = compare(lock, {"cpu": {"a": RESHAPED}}, plan="plan", jax="1", options="JAX_B=3")
    held = compare(lock, {"cpu": {"a": ONE}}, plan="plan", jax="1", options="JAX_B=3")

    (group,) = groups(moved)
    assert group.cause == "options: -JAX_A=1 -JAX_B=2 +JAX_B=3; signature: argument x: shape"
    assert held.holds


def test_a_thousand_variants_that_moved_for_one_reason_are_one_group() -> None:
    def lines(fingerprint: str, dtype: str) -> dict[str, LockLine]:
        return {
            f"step/t{size}": LockLine(
                fingerprint=fingerprint, signature=f"x: {dtype}[{size}], y: f32[1] -> f32[{size}]"
            )
            for size in range(1000)
        }

    lock = lock_of({"cpu": lines("1", "f32")})
    (group,) = groups(compare(lock, {"cpu": lines("2", "bf16")}, plan="plan"))

    assert (group.cause, len(group.names)) == ("signature: argument x: dtype", 1000)
    assert group.detail == "argument x: f32[0] -> bf16[0]"


KERNELS = LockLine(fingerprint="1", signature="s", kernels={AROUND: "1", "one": "1", "two": "1"})


@pytest.mark.parametrize(
    ("kernels", "what"),
    [
        ({AROUND: "1", "one": "1", "two": "2"}, "kernel two"),
        ({AROUND: "2", "one": "1", "two": "2"}, "kernel two and code around the kernels"),
        ({AROUND: "2", "one": "1", "two": "1"}, "code around the kernels"),
        ({AROUND: "1", "one": "1"}, "kernel two (gone)"),
        ({AROUND: "1", "one": "1", "two": "1", "three": "1"}, "kernel three (new)"),
        ({AROUND: "1", "one": "1", "two": "1"}, "the tree of arguments or results"),
    ],
)
def test_the_kernel_that_moved_is_named(kernels: dict[str, str], what: str) -> None:
    """CASES 30."""
    now = LockLine(fingerprint="2", signature="s", kernels=kernels)
    found = compare(lock_of({"cpu": {"a": KERNELS}}), {"cpu": {"a": now}}, plan="plan")

    assert [moved.cause for moved in found.moved] == [f"{what} moved, signature did not"]


@pytest.mark.parametrize("update", [[], ["--update"]])
def test_a_lock_that_is_a_folder_is_an_error(
    update: list[str], tiny_config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_config.with_suffix(".lock.json").mkdir()

    assert run(["check", str(tiny_config), *update]) not in (EXIT_OK, 1)
    assert "the lock cannot be " in capsys.readouterr().err
