"""`aot-lora fit`: what it prints, what it writes, and what it refuses."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.errors import EXIT_OK, EXIT_USAGE, ConfigError


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Forty requests a second apart: prompts of 20 to 60 tokens, adapters a, b and none."""
    path = tmp_path / "trace.csv"
    rows = (f"{at},{20 + 7 * at % 41},{5 + at % 9},{('a', 'b', '')[at % 3]}\n" for at in range(40))
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens,Adapter\n" + "".join(rows))
    return path


def asked(
    arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = EXIT_OK
) -> tuple[str, str]:
    assert run(["fit", *arguments]) == code
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize("of", ["steps", "prompts"])
def test_what_is_printed_for_people(
    of: str,
    trace: Path,
    write_config: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    config = write_config(tokens="{budget: 64, buckets: {step: 32}}")
    options = ["--config", str(config), "--count", "4", "--multiple", "8", "--sequences", "8"]
    more = ["--slots", "2", "--step-ms", "300"] if of == "steps" else []
    out, err = asked([str(trace), *options, "--of", of, *more], capsys)

    assert out.replace(f"{trace.parent}/", "") == snapshot
    assert err == ""


def test_json_is_one_object_on_one_line(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "50", "--count", "3", "--sequences", "4", "--format", "json"]
    out, _ = asked([str(trace), *options, "--of", "prompts"], capsys)
    found: dict[str, Any] = json.loads(out)

    assert list(found) == [
        "requests", "steps", "clipped", "budget", "buckets", "slots", "policies",
    ]  # fmt: skip
    assert (found["requests"], found["steps"], found["clipped"]) == (40, None, 9)
    assert found["buckets"] == [p["bucket_tokens"] for p in found["policies"][-1]["buckets"]]
    assert found["buckets"][-1] == 50
    assert [p["name"] for p in found["policies"]] == ["pow2", "step 32", "fit 3"]


def test_write_changes_the_buckets_and_keeps_the_comments(
    trace: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tokens="{budget: 64, buckets: pow2, smallest: 16}  # of a step")
    before = config.read_text()
    options = ["--config", str(config), "--count", "3", "--sequences", "4", "--write"]
    out, err = asked([str(trace), *options, "--format", "json"], capsys)
    buckets = json.loads(out)["buckets"]

    assert config.read_text() == before.replace("pow2, smallest: 16", str(buckets))
    assert load_config(config).plan.tokens.buckets == tuple(buckets)
    assert err == f"wrote 3 token buckets into {config}\n"
    assert [path.name for path in config.parent.iterdir() if path.suffix == ".new"] == []


def test_the_roofline_needs_a_target_that_has_one(
    trace: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    tpu = write_config(target='{platform: tpu, topology: "v6e:1x1"}', name="tpu.yaml")
    options = ["--of", "prompts", "--budget", "64", "--cost", "roofline", "--config"]

    # So small a model reads its weights longer than it computes: only the last bucket counts.
    out, err = asked([str(trace), *options, str(tpu), "--format", "json"], capsys)
    assert json.loads(out)["buckets"] == [32, 48, 64]
    assert err == f"warning: the buckets of {tpu} end at 8, below the budget 64: " \
        "they are not compared\n"  # fmt: skip
    _, err = asked([str(trace), *options, str(write_config())], capsys, EXIT_USAGE)
    assert "no roofline is known for cpu" in err


def test_an_overloaded_server_is_said(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--budget", "64", "--sequences", "4", "--step-ms", "2000"]
    _, err = asked([str(trace), *options], capsys)

    assert err.startswith("warning: the trace is more than this server does: it ended ")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--write"], "--write needs a config\n  next: name it with --config"),
        (["--cost", "roofline"], "--cost roofline needs a config"),
        (
            ["--config", "cpu/quickstart", "--write"],
            "cpu/quickstart: --write would change a preset",
        ),
        (["--budget", "8"], "a budget of 8 tokens for 256 sequences"),
        (["--budget", "8", "--sequences", "8"], "the budget 8 is below the smallest bucket 16"),
        (["--count", "0"], "no buckets were asked for"),
        (["--count", "-1"], "no buckets were asked for"),
        (["--multiple", "0"], "buckets cannot be multiples of 0"),
        (["--step-ms", "0"], "a step that takes no time"),
        (["--step-ms", "nan"], "a step that takes no time"),
        (["--token-us", "inf"], "a step that takes no time"),
        (["--count", "99999"], "99,999 buckets were asked for"),
        (["--budget", str(10**30)], "a budget of 1,000,000,000,000"),
        (["--multiple", str(10**30), "--small"], "the budget 2048 is below the smallest bucket 10"),
        (["--of", "prompts", "--slots", "2"], "TRACE: no adapters to fit slots to"),
        (["--slots", "0"], "no buckets were asked for"),
        (["--budget", "0"], "a budget of 0 tokens for 256 sequences"),
    ],
)
def test_what_cannot_be_is_refused(
    options: list[str], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = trace.read_bytes()
    out, err = asked([str(trace), *options], capsys, EXIT_USAGE)

    assert out == ""
    assert err.startswith("aot-lora: " + said.replace("TRACE", str(trace)))
    assert trace.read_bytes() == before


def test_help_says_what_a_trace_is(capsys: pytest.CaptureFixture[str]) -> None:
    out, err = asked(["--help"], capsys)

    assert "Usage: aot-lora fit [OPTIONS] [TRAFFIC]" in out
    assert "TIMESTAMP,ContextTokens,GeneratedTokens" in out
    assert err == ""


def test_buckets_that_the_rest_of_a_config_refuses_are_not_written(
    trace: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tokens="{budget: 64, buckets: pow2, prefill_chunk: 64}")
    before = config.read_text()
    options = ["--config", str(config), "--budget", "48", "--sequences", "4", "--write"]
    _, err = asked([str(trace), *options], capsys, EXIT_USAGE)

    assert f"{config}: not written: with these buckets it is no good config\n" in err
    assert "found: `tokens`: prefill_chunk 64 is above the largest bucket 48" in err
    assert config.read_text() == before
    assert sorted(path.name for path in config.parent.iterdir()) == ["tiny.yaml", "trace.csv"]


def test_a_link_to_a_config_stays_one(
    trace: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tokens="{budget: 64, buckets: pow2}")
    link = config.with_name("link.yaml")
    link.symlink_to(config.name)
    asked([str(trace), "--config", str(link), "--sequences", "4", "--write"], capsys)

    assert link.is_symlink()
    assert "pow2" not in config.read_text()


# --- `buckets: {fit: ...}` -----------------------------------------------------------------------


@pytest.mark.parametrize("of", ["steps", "prompts"])
def test_a_config_may_name_the_trace_itself(
    of: str, trace: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    policy = f"{{fit: trace.csv, count: 4, multiple: 8, sequences: 8, of: {of}}}"
    config = write_config(tokens=f"{{budget: 64, buckets: {policy}}}  # of a step")
    options = ["--config", str(config), "--count", "4", "--multiple", "8", "--sequences", "8"]
    out, _ = asked([str(trace), *options, "--of", of, "--format", "json", "--write"], capsys)
    before = load_config(config).plan

    assert list(before.tokens.buckets) == json.loads(out)["buckets"]
    trace.unlink()  # the list is written out: same plan, same identity
    assert "fit" not in config.read_text()
    assert load_config(config).plan.digest() == before.digest()


@pytest.mark.parametrize(
    ("policy", "budget", "said"),
    [
        ("{fit: trace.csv, count: 3}", 64, "a budget of 64 tokens for 256 sequences"),
        ("{fit: trace.csv, count: 3, sequences: 70}", 64, "a budget of 64 tokens for 70 sequences"),
        ("{fit: none.csv, count: 3}", 64, "the trace to fit is no file"),
    ],
)
def test_a_config_that_cannot_be_fitted_names_its_place(
    policy: str, budget: int, said: str, trace: Path, write_config: Callable[..., Path]
) -> None:
    config = write_config(tokens=f"{{budget: {budget}, buckets: {policy}}}")
    with pytest.raises(ConfigError) as caught:
        load_config(config)

    assert str(caught.value).startswith(f"{config}:5:22: {said}")
    assert trace.is_file()


def test_a_bad_trace_of_a_config_names_its_line(
    trace: Path, write_config: Callable[..., Path]
) -> None:
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n2,,3\n")
    with pytest.raises(ConfigError, match=r"trace\.csv:3: bad prompt tokens"):
        load_config(write_config(tokens="{budget: 64, buckets: {fit: trace.csv, count: 3}}"))
