"""The command line: exit codes, what goes to which stream, and the keys that scripts rely on."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from syrupy.assertion import SnapshotAssertion

from aot_lora import errors
from aot_lora.cli.main import run

VERBS = ("plan", "warmup", "check", "inspect", "verify")

# What each verb's object holds with `--format json`: scripts rely on these names and their order.
KEYS = {
    "plan": ["points", "variants", "seconds", "bytes", "waste"],
    "check": ["variants", "stable", "moved", "missing", "stale", "new"],
    "warmup": ["points", "variants", "traced", "compiled", "reused", "failed", "seconds", "bytes"],
    "verify": ["variants", "whole", "damaged", "bytes"],
    "inspect": ["target", "variants", "artifacts", "bytes", "parts"],
}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A config whose store and lock are filled by real processes, and what they printed."""
    folder = tmp_path_factory.mktemp("warmed")
    config = folder / "one.yaml"
    config.write_text(
        "model: {q_proj: [8, 8]}\n"
        "target: {platform: cpu}\n"
        "lora: {ranks: [8], slots: [2], max_adapters: 2, dtype: float32}\n"
        "tokens: {budget: 8, buckets: [8]}\n"
        "store: {root: store}\n"
    )
    printed = {
        verb: subprocess.run(
            [sys.executable, "-m", "aot_lora", verb, str(config), "--format", "json", *options],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for verb, options in (("check", ["--update"]), ("warmup", ["--jobs", "1"]))
    }
    return config, printed


def said(capsys: pytest.CaptureFixture[str]) -> SimpleNamespace:
    captured = capsys.readouterr()
    return SimpleNamespace(out=captured.out, err=captured.err)


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_one_object_on_one_line_with_these_keys(
    verb: str, warmed: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, printed = warmed
    if verb not in printed:
        assert run([verb, str(config), "--format", "json"]) == errors.EXIT_OK
        printed = {verb: said(capsys).out}

    (line,) = printed[verb].splitlines()
    assert list(json.loads(line)) == KEYS[verb]


def test_every_verb_has_its_keys_listed() -> None:
    assert set(KEYS) == set(VERBS)


def test_a_second_warmup_does_no_work(
    warmed: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["warmup", str(warmed[0]), "--format", "json"]) == errors.EXIT_OK

    found = json.loads(said(capsys).out)
    first = json.loads(warmed[1]["warmup"])
    assert [first[key] for key in ("traced", "compiled", "reused", "failed")] == [4, 4, 0, 0]
    assert [found[key] for key in ("traced", "compiled", "reused", "failed")] == [0, 0, 4, 0]
    assert found["bytes"] == first["bytes"] > 0


def test_an_artifact_and_a_variant_can_be_inspected(
    warmed: tuple[Path, dict[str, str]], capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = warmed
    variant = "bank_reset/l8-d8-o8-n1"
    assert run(["inspect", str(config), variant, "--format", "json"]) == errors.EXIT_OK
    by_name = json.loads(said(capsys).out)
    (file,) = (
        path
        for path in (config.parent / "store").rglob("*.aot")
        if run(["inspect", str(path)]) == errors.EXIT_OK and variant in said(capsys).out
    )

    assert run(["inspect", str(file), "--format", "json"]) == errors.EXIT_OK
    assert json.loads(said(capsys).out) == by_name
    assert by_name["variant"] == variant
    assert by_name["bytes"] == file.stat().st_size


# --- For people ----------------------------------------------------------------------------------


@pytest.mark.usefixtures("known_costs")
def test_the_plan_of_the_quickstart(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    snapshot: SnapshotAssertion,
) -> None:
    monkeypatch.setenv("AOT_LORA_CACHE", "/the/store")

    assert run(["plan", "cpu/quickstart"]) == errors.EXIT_OK
    found = said(capsys)
    first, _, rest = found.out.partition("\n")

    assert Path(first.removesuffix(" for cpu")).parts[-3:] == ("buckets", "cpu", "quickstart.yaml")
    assert rest == snapshot
    assert found.err == ""


def test_the_listed_variants_are_the_plans(
    tiny_config: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    assert run(["plan", str(tiny_config), "--variants"]) == errors.EXIT_OK

    assert said(capsys).out.splitlines()[-13:] == snapshot


@pytest.mark.parametrize("verb", VERBS)
def test_help_is_on_stdout_and_says_what_each_verb_does(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (run(["--help"]), run([verb, "--help"])) == (errors.EXIT_OK, errors.EXIT_OK)
    found = said(capsys)

    assert f"\n  {verb} " in found.out
    assert f"Usage: aot-lora {verb} [OPTIONS] CONFIG" in found.out
    assert found.err == ""


def test_a_warning_is_on_stderr_and_does_not_disturb_the_data(
    write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(tokens="{budget: 16, buckets: [16, 8, 8]}")

    assert run(["plan", str(config), "--format", "json"]) == errors.EXIT_OK
    found = said(capsys)
    assert json.loads(found.out)["waste"][-1]["bucket_tokens"] == 16
    assert found.err.startswith(f"warning: {config}:5:22: [16, 8, 8] is not sorted")


# --- Exit codes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        ([], errors.EXIT_USAGE),
        (["--version"], errors.EXIT_OK),
        (["compile", "CONFIG"], errors.EXIT_USAGE),
        (["plan"], errors.EXIT_USAGE),
        (["plan", "CONFIG", "--no-such-option"], errors.EXIT_USAGE),
        (["plan", "CONFIG", "--format", "xml"], errors.EXIT_USAGE),
        (["plan", "no/such/config"], errors.EXIT_USAGE),
        (["plan", "."], errors.EXIT_USAGE),
        (["warmup", "CONFIG", "--jobs", "0"], errors.EXIT_USAGE),
        (["check", "CONFIG"], errors.EXIT_CHECK),
        (["verify", "CONFIG"], errors.EXIT_CHECK),
        (["inspect", "CONFIG"], errors.EXIT_CHECK),
        (["inspect", "no/such/file.aot"], errors.EXIT_USAGE),
        (["inspect", "DAMAGED"], errors.EXIT_INTEGRITY),
    ],
)
def test_exit_codes(
    arguments: list[str],
    code: int,
    tiny_config: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    damaged = tmp_path / "damaged.aot"
    damaged.write_bytes(b"AOT-LORA" + bytes(60))
    named = {"CONFIG": str(tiny_config), "DAMAGED": str(damaged)}

    assert run([named.get(argument, argument) for argument in arguments]) == code
    found = said(capsys)
    if code != errors.EXIT_OK:
        assert found.out == ""
        assert found.err
        assert "Traceback" not in found.err


def test_exit_codes_are_those_of_the_design() -> None:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}

    assert codes == {
        "EXIT_OK": 0,
        "EXIT_INTERNAL": 1,
        "EXIT_USAGE": 2,
        "EXIT_CHECK": 3,
        "EXIT_INTEGRITY": 4,
        "EXIT_UNSUPPORTED": 5,
        "EXIT_INTERRUPTED": 130,
    }


RAISED = [
    (errors.UnsupportedError("no such device"), errors.EXIT_UNSUPPORTED, "no such device"),
    (errors.StoreError("disk full"), errors.EXIT_UNSUPPORTED, "disk full"),
    (errors.IntegrityError("flipped"), errors.EXIT_INTEGRITY, "flipped"),
    (errors.CoverageError("missing"), errors.EXIT_CHECK, "missing"),
    (KeyboardInterrupt(), errors.EXIT_INTERRUPTED, "interrupted; what is stored stays valid"),
    (KeyError("slot"), errors.EXIT_INTERNAL, "internal error: KeyError: 'slot'"),
]


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("error", "code", "text"), RAISED)
def test_an_error_has_its_code_and_a_traceback_only_with_debug(
    error: BaseException,
    code: int,
    text: str,
    debug: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("aot_lora.cli.plan.read_config", fail)

    assert run(["plan", "any", *["--debug"] * debug]) == code
    found = said(capsys)
    assert f"aot-lora: {text}" in found.err
    assert ("Traceback" in found.err) == (debug and code != errors.EXIT_INTERRUPTED)
    assert found.out == ""
