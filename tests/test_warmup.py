"""Warmup: fills a store, finds it filled, mends what is damaged, and survives what it compiles."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import TINY
from serving import (
    artifacts_in,
    cli,
    edit_manifest,
    identity_of,
    manifest_of,
    remount,
    shared_folder,
    store_of,
    tmpfs,
    warm,
    write,
)

from aot_lora import Runtime, errors, load_config
from aot_lora.cli.main import run
from aot_lora.warmup import warmup

VARIANTS = 13
REPORT = {"points", "variants", "traced", "compiled", "reused", "failed", "seconds", "bytes"}


@pytest.fixture(scope="module")
def warmed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`TINY`, warmed up once; copy it before changing anything."""
    config = write(shared_folder(tmp_path_factory, "warmed") / "tiny.yaml", TINY)
    report = warmup(load_config(config))
    assert (report.variants, report.failed) == (VARIANTS, ())
    return config


@pytest.fixture
def copy(warmed: Path, tmp_path: Path) -> Path:
    return shutil.copytree(warmed.parent, tmp_path / "copy") / warmed.name


def counts(report: dict[str, int]) -> tuple[int, int, int, int]:
    return report["traced"], report["compiled"], report["reused"], report["failed"]


# --- What is done stays done --------------------------------------------------------------------


def imports_jax(*arguments: object) -> bool:
    code = (
        "import sys\nfrom aot_lora.cli.main import run\n"
        "assert run(sys.argv[1:]) in (0, 3)\nsys.stderr.write(str('jax' in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stderr.endswith("True")


def test_a_second_run_traces_compiles_and_imports_nothing(copy: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in artifacts_in(copy.parent / "store")}
    report = warm(copy)

    assert set(report) == REPORT
    assert counts(report) == (0, 0, VARIANTS, 0)
    assert {path: path.stat().st_mtime_ns for path in artifacts_in(copy.parent / "store")} == before
    assert not imports_jax("warmup", copy)
    assert imports_jax("check", copy, "--update")  # Positive control: it would be seen.


def test_a_moved_checkout_is_still_warm(warmed: Path, copy: Path) -> None:
    assert identity_of(copy) == identity_of(warmed)


def test_a_grown_config_compiles_only_what_is_new(copy: Path) -> None:
    old = {entry.key for entry in manifest_of(copy).entries}
    copy.write_text(copy.read_text().replace("buckets: [8]", "buckets: [4, 8]"))
    report = warm(copy)

    assert report["variants"] > VARIANTS
    assert report["compiled"] == report["variants"] - VARIANTS
    assert report["reused"] == VARIANTS
    assert old < {entry.key for entry in manifest_of(copy).entries}
    # What another warmup compiled has no seconds of this one.
    assert {e.key in old for e in manifest_of(copy).entries if e.seconds} == {False}
    assert {e.key in old for e in manifest_of(copy).entries if e.seconds is None} == {True}


@pytest.mark.once
@pytest.mark.parametrize("jobs", [1, 2])
def test_the_number_of_workers_does_not_matter(tiny_config: Path, warmed: Path, jobs: int) -> None:
    report = warm(tiny_config, "--jobs", jobs)

    assert counts(report) == (VARIANTS, VARIANTS, 0, 0)
    assert report["bytes"] == sum(entry.bytes for entry in manifest_of(tiny_config).entries)
    assert [(e.variant, e.key) for e in manifest_of(tiny_config).entries] == [
        (e.variant, e.key) for e in manifest_of(warmed).entries
    ]


def test_two_at_once_share_the_work(tiny_config: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        runs = list(threads.map(lambda _: cli("warmup", tiny_config, "--format", "json"), range(2)))
    reports = sorted((json.loads(run.stdout) for run in runs), key=lambda r: r["compiled"])

    assert [run.returncode for run in runs] == [0, 0]
    assert [counts(report) for report in reports] == [
        (0, 0, VARIANTS, 0),
        (VARIANTS, VARIANTS, 0, 0),
    ]
    assert sum("waiting for it" in run.stderr for run in runs) == 1
    assert run(["verify", str(tiny_config)]) == errors.EXIT_OK


# --- Damage (case 24) ---------------------------------------------------------------------------


def flip(data: bytes) -> bytes:
    return data[:-40] + bytes([data[-40] ^ 1]) + data[-39:]


@pytest.mark.parametrize(
    "damage", [flip, lambda data: data[:-1], lambda _: b""], ids=["flipped", "truncated", "empty"]
)
@pytest.mark.once
def test_a_damaged_artifact_is_refused_then_rebuilt(
    copy: Path, damage: Callable[[bytes], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    victim = artifacts_in(copy.parent / "store")[3]
    victim.write_bytes(damage(victim.read_bytes()))

    with pytest.raises(errors.IntegrityError) as caught:
        Runtime.open(copy)
    assert caught.value.where == str(victim)
    assert run(["verify", str(copy), "--format", "json"]) == errors.EXIT_INTEGRITY
    refused = capsys.readouterr()
    assert str(victim) in refused.err
    assert json.loads(refused.out)["damaged"] == 1

    mended = cli("warmup", copy, "--format", "json", "--jobs", 1)
    aside = copy.parent / "store" / "damaged" / victim.name
    assert f"damaged artifact set aside as {aside}; its variant is rebuilt" in mended.stderr
    assert counts(json.loads(mended.stdout)) == (1, 1, VARIANTS - 1, 0)
    assert aside.exists()
    Runtime.open(copy).close()


@pytest.mark.once
def test_a_missing_artifact_is_refused_then_rebuilt(copy: Path) -> None:
    victim = artifacts_in(copy.parent / "store")[3]
    victim.unlink()

    with pytest.raises(errors.IntegrityError, match="the artifact is missing") as caught:
        Runtime.open(copy)
    assert caught.value.where == str(victim)
    assert counts(warm(copy)) == (1, 1, VARIANTS - 1, 0)
    assert not (copy.parent / "store" / "damaged").exists()


@pytest.mark.once
def test_a_whole_artifact_in_another_s_place_is_refused_then_rebuilt(copy: Path) -> None:
    first, second, *_ = artifacts_in(copy.parent / "store")
    shutil.copy(first, second)

    with pytest.raises(errors.IntegrityError, match="another one than the manifest names"):
        Runtime.open(copy)
    assert counts(warm(copy)) == (1, 1, VARIANTS - 1, 0)
    Runtime.open(copy).close()

    shutil.copy(first, second)
    store_of(copy).manifest_path(identity_of(copy)).unlink()  # No digest is left to compare with.
    assert counts(warm(copy)) == (VARIANTS, 1, VARIANTS - 1, 0)
    Runtime.open(copy).close()


@pytest.mark.once
def test_an_artifact_that_another_warmup_rebuilt_is_kept(copy: Path) -> None:
    def other_digest(manifest: dict[str, list[dict[str, str]]]) -> None:
        manifest["entries"][0]["digest"] = "0" * 64

    edit_manifest(copy, other_digest)

    assert counts(warm(copy)) == (1, 0, VARIANTS, 0)
    assert counts(warm(copy)) == (0, 0, VARIANTS, 0)


@pytest.mark.parametrize("text", ["", "{", '{"format": 9}'])
@pytest.mark.once
def test_a_damaged_manifest_is_refused_then_rewritten(copy: Path, text: str) -> None:
    path = store_of(copy).manifest_path(identity_of(copy))
    path.write_text(text)

    with pytest.raises(errors.IntegrityError) as caught:
        Runtime.open(copy)
    assert caught.value.where == str(path)
    assert counts(warm(copy)) == (VARIANTS, 0, VARIANTS, 0)
    Runtime.open(copy).close()


# --- Disks --------------------------------------------------------------------------------------


@pytest.mark.once
def test_a_full_disk_stops_it_and_more_space_lets_it_finish(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "disk", size="48k") as disk:
        config = write_config(store=f"{{root: {disk}}}")
        full = cli("warmup", config, "--jobs", 1)
        assert full.returncode == errors.EXIT_UNSUPPORTED
        assert "aot-lora: " in full.stderr
        assert "the disk is full" in full.stderr
        assert "everything already stored stays valid" in full.stderr
        assert "Traceback" not in full.stderr
        assert run(["verify", str(config)]) == errors.EXIT_CHECK

        remount(disk, "size=8m")
        stored = len(artifacts_in(disk))
        assert 0 < stored < VARIANTS
        report = warm(config)
        assert (report["compiled"], report["reused"]) == (VARIANTS - stored, stored)


@pytest.mark.once
def test_a_read_only_store_serves_and_refuses_new_work(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    with tmpfs(tmp_path / "disk", size="8m") as disk:
        config = write_config(store=f"{{root: {disk}}}")
        warm(config)
        remount(disk, "ro")

        Runtime.open(config).close()
        assert run(["verify", str(config)]) == errors.EXIT_OK
        refused = cli(
            "warmup", write_config(store=f"{{root: {disk}}}", tokens="{budget: 4, buckets: [4]}")
        )
        assert refused.returncode == errors.EXIT_UNSUPPORTED
        assert "the store" in refused.stderr
        assert "--store" in refused.stderr
        assert "Traceback" not in refused.stderr


# --- Programs that fail, and programs that share ------------------------------------------------

USER = """\
import jax, os, sys
from aot_lora import Program

def work(point, context):
    if point.tokens == 4 and point.lanes:
        {fault}
    return Program(fn=double, args=(context.array(point.tokens, 8 + point.lanes),))

def double(x):
    return x + x
"""


@pytest.mark.once
@pytest.mark.parametrize(
    ("fault", "reason", "code"),
    [
        ("raise ValueError('no such point')", "the program raised ValueError: no such point", 2),
        ("sys.exit(3)", "the program raised SystemExit: 3", 2),
        ("os.abort()", "the compiler ended its process", 1),
    ],
)
def test_a_program_that_fails_takes_only_its_variant_with_it(
    write_config: Callable[..., Path], tmp_path: Path, fault: str, reason: str, code: int
) -> None:
    config = write_config(
        programs='[{entry: "engine_of_faults:work"}]',
        tokens="{budget: 8, buckets: [4, 8]}",
        lora="{ranks: [8], slots: [0, 1], max_adapters: 1}",
    )
    module = tmp_path / "engine_of_faults.py"
    module.write_text(USER.format(fault=fault))
    done = cli("warmup", config, "--format", "json", "--jobs", 2)
    report = json.loads(done.stdout)

    assert done.returncode == code
    assert counts(report) == (4, 3, 0, 1)
    assert f"failed: work/t4-l8: {reason}" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(errors.CoverageError, match="no finished warmup"):
        Runtime.open(config)

    again = cli("warmup", config, "--format", "json", "--jobs", 1)
    assert again.returncode == code
    assert counts(json.loads(again.stdout)) == (1, 0, 3, 1)


def test_workers_that_end_at_their_start_are_told_and_not_waited_for(
    tiny_config: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\nif any('spawn_main' in part for part in sys.orig_argv):\n    os._exit(3)\n"
    )
    done = cli("warmup", tiny_config, PYTHONPATH=os.pathsep.join((str(tmp_path), *sys.path)))

    assert done.returncode == errors.EXIT_INTERNAL
    assert "the worker processes ended before they took any work" in done.stderr
    assert "internal error" not in done.stderr


@pytest.mark.parametrize(
    ("args", "fn", "found"),
    [
        ("4", "lambda x: x + next(count)", "other code, or other constants"),
        ("next(count)", "abs", "x: f32[1] -> f32[1], then x: f32[2] -> f32[2]"),
    ],
)
def test_a_program_that_changes_between_two_calls_is_refused(
    write_config: Callable[..., Path], tmp_path: Path, args: str, fn: str, found: str
) -> None:
    """What was compiled would be another program than what the next process asks for."""
    (tmp_path / "engine_that_counts.py").write_text(
        "import itertools\nfrom aot_lora import Program\ncount = itertools.count(1)\n"
        f"def work(point, context):\n"
        f"    return Program(fn={fn}, args=(context.array({args}, dtype='float32'),))\n"
    )
    config = write_config(programs='[lora, {entry: "engine_that_counts:work"}]')
    done = cli("warmup", config, "--format", "json", "--jobs", 1)
    report = json.loads(done.stdout)

    assert done.returncode == 2
    assert report["failed"] == 3
    assert report["compiled"] == report["variants"] - 3
    assert "the program changes from one call of its function to the next" in done.stderr
    assert f"found: {found}" in done.stderr


def test_variants_that_share_an_executable_agree_on_its_file(
    write_config: Callable[..., Path], tmp_path: Path
) -> None:
    twin = USER.format(fault="pass").replace(" + point.lanes", "")
    (tmp_path / "engine_of_twins.py").write_text(twin)
    config = write_config(programs='[{entry: "engine_of_twins:work"}]')
    warm(config, "--jobs", 2)

    assert len(manifest_of(config).entries) == 3
    assert len({(entry.key, entry.digest) for entry in manifest_of(config).entries}) == 1
    assert run(["verify", str(config)]) == errors.EXIT_OK
    assert counts(warm(config)) == (0, 0, 3, 0)
