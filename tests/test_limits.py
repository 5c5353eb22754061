"""Limits of a plan: what is refused, and that each change the refusal names is one that fits."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from syrupy.assertion import SnapshotAssertion

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.config.limits import hold_limits
from aot_lora.config.load import read
from aot_lora.errors import EXIT_OK, EXIT_USAGE, ConfigError, PlanError
from aot_lora.plan import Plan

GRID = """\
model: {q_proj: [16, 16], k_proj: [16, 8]}
target: {platform: cpu}
lora:
  ranks: [8, 16, 32]
  slots: [0, 1, 2, 4]   # active
  max_adapters: 4
tokens:
  budget: 128
  buckets: pow2
  smallest: 16
"""
PROGRAMS = "programs: [lora, {entry: 'engine:step'}, {entry: 'engine:few', max_tokens: 20}]\n"
pytestmark = pytest.mark.usefixtures("known_costs")


def refusal(path: Path) -> PlanError:
    config = read(path)
    with pytest.raises(PlanError) as caught:
        hold_limits(config.asked, config.plan, config.targets, seconds=True)
    assert caught.value.exit_code == EXIT_USAGE
    return caught.value


def offered(text: str) -> list[dict[str, object]]:
    """The YAML of each change that an error names."""
    found: list[dict[str, object]] = []
    for line in text.partition("\n  next: ")[2].splitlines():
        change: dict[str, object] = {}
        for code in re.findall(r"`([^`]*)`", line):
            change |= yaml.safe_load(code)
        found.append(change)
    return found


def changed(text: str, change: dict[str, object]) -> str:
    value = yaml.safe_load(text)
    for key, new in change.items():
        if key == "limits":
            value[key] = {**value[key], **new}  # pyright: ignore[reportGeneralTypeIssues]
        else:
            (value if key == "tokens" else value["lora"])[key] = new
    return yaml.safe_dump(value)


LIMITED = {
    "variants": "limits: {variants: 80}\n",
    "few variants": "limits: {variants: 22}\n",
    "seconds": "limits: {seconds: 31.5}\n",
    "bytes": "limits: {store_bytes: 60MiB}\n",
    "two of them": "limits: {variants: 70, store_bytes: 50MiB}\n",
    "nothing fits": "limits: {variants: 3}\n",
}


@pytest.mark.parametrize("case", LIMITED)
@pytest.mark.parametrize("programs", ["", PROGRAMS], ids=["", "programs"])
def test_a_refusal_has_place_numbers_and_what_would_fit(
    case: str, programs: str, write_config: Callable[..., Path], snapshot: SnapshotAssertion
) -> None:
    path = write_config(GRID + programs + LIMITED[case], name="c.yaml")

    assert str(refusal(path)).replace(f"{path.parent}/", "") == snapshot


@pytest.mark.parametrize("case", LIMITED)
@pytest.mark.parametrize("programs", ["", PROGRAMS], ids=["", "programs"])
@pytest.mark.parametrize(
    "more", ["", "tokens: {budget: 100, buckets: [8, 40, 64, 96], prefill_chunk: 32}\n"],
    ids=["pow2", "list"],
)  # fmt: skip
def test_each_change_that_is_named_is_accepted_as_written(
    case: str, programs: str, more: str, write_config: Callable[..., Path]
) -> None:
    text = (GRID.partition("tokens:")[0] + more if more else GRID) + programs + LIMITED[case]
    found = offered(str(refusal(write_config(text))))

    assert found
    for change in found:
        config = read(write_config(changed(text, change)))
        if case == "nothing fits":  # of it only the limits are new: the smallest grid would fit
            assert set(change) == {"tokens", "slots", "ranks", "limits", "quantum"}
        hold_limits(config.asked, config.plan, config.targets, seconds=True)
        assert config.plan.quantum == 8
        assert config.prefill_chunk == (32 if more else None)


def test_changes_fit_where_steps_cost_more_and_are_another_part_of_fewer_variants(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aot_lora.plan.cost._PER_STEP", {"cpu": (30.0, 2**24)})
    shares: set[float] = set()
    for seconds in range(70, 170, 5):
        text = GRID + PROGRAMS + f"limits: {{seconds: {seconds}}}\n"
        for change in offered(str(refusal(write_config(text)))):
            plan = read(write_config(changed(text, change)))
            hold_limits(plan.asked, plan.plan, plan.targets, seconds=True)
            shares.add(plan.plan.step_share)

    assert max(shares) > read(write_config(GRID + PROGRAMS)).plan.step_share


@pytest.mark.parametrize("limit", ["variants", "seconds", "store_bytes"])
def test_a_plan_is_refused_exactly_above_its_limit(
    limit: str, write_config: Callable[..., Path]
) -> None:
    config = read(write_config(GRID))
    count = len(config.plan.variants)
    at = {"variants": count, "seconds": 2 * count / 4, "store_bytes": count * 2**20}[limit]

    path = write_config(f"{GRID}limits: {{{limit}: {at}}}\n")
    assert run(["plan", str(path), "--format", "json"]) == EXIT_OK
    below = at - 0.1 if limit == "seconds" else at - 1
    path = write_config(f"{GRID}limits: {{{limit}: {below}}}\n")
    assert run(["plan", str(path)]) == EXIT_USAGE


def test_limits_are_for_all_targets_together(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {"cpu": (2.0, 2**20), "cuda without a GPU": (2.0, 2**20)}
    for table in ("_PER_VARIANT", "_PER_STEP"):
        monkeypatch.setattr(f"aot_lora.plan.cost.{table}", costs)
    two = GRID.replace("{platform: cpu}", "[{platform: cpu}, {platform: cuda, topology: h200}]")
    count = len(read(write_config(GRID)).plan.variants)

    load_config(write_config(f"{two}limits: {{variants: {2 * count}}}\n"))
    with pytest.raises(PlanError, match="for 2 targets"):
        load_config(write_config(f"{two}limits: {{variants: {2 * count - 1}}}\n"))


def test_seconds_are_for_hosts_that_compile(write_config: Callable[..., Path]) -> None:
    """A server of few cores opens what a build host of many has made."""
    path = write_config(GRID + "limits: {seconds: 1}\n")

    load_config(path)
    for verb in ("plan", "warmup"):
        assert run([verb, str(path)]) == EXIT_USAGE


def test_a_trace_decides_which_buckets_go(
    write_config: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"{at},{100 if at % 9 else 60},3\n" for at in range(40))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    text = GRID.replace("ranks: [8, 16, 32]", "ranks: [8]").replace("[0, 1, 2, 4]", "[2]")
    path = write_config(text + "limits: {variants: 13}\n")

    texts: list[str] = []
    for options in ([], ["--traffic", str(trace), "--sequences", "4"]):
        assert run(["plan", str(path), *options]) == EXIT_USAGE
        captured = capsys.readouterr()
        assert captured.out == ""
        texts.append(captured.err)
    assert "buckets: [16, 64, 128]" not in texts[0]
    assert "`tokens: {budget: 128, buckets: [16, 64, 128]}` at line 7" in texts[1]
    assert "no more work for the steps of the trace" in texts[1]


@pytest.mark.parametrize(
    "limits", ["seconds: 0", "seconds: -1", "seconds: soon", "seconds: .inf", "seconds: true"]
)
def test_seconds_that_are_none_are_refused(limits: str, write_config: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r":11:\d+: `limits.seconds`"):
        load_config(write_config(f"{GRID}limits: {{{limits}}}\n"))


def test_the_search_is_not_loaded_where_nothing_is_refused(
    write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "aot_lora.plan.changes", None)
    assert isinstance(load_config(write_config(GRID)).plan, Plan)
    with pytest.raises(ImportError):  # it would have been
        load_config(write_config(GRID + "limits: {variants: 9}\n"))
