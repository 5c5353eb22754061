"""Warmup killed or interrupted at any moment: the next run finishes only what is missing."""

import json
import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from serving import artifacts_in, cli, identity_of, process_group, store_of, wait_for

from aot_lora import errors
from aot_lora.cli.main import run

VARIANTS = 13


def finishes_only_what_is_missing(config: Path) -> None:
    stored = len(artifacts_in(config.parent / "store"))
    done = cli("warmup", config, "--format", "json", "--jobs", 1)
    report = json.loads(done.stdout)

    assert done.returncode == 0, done.stderr
    assert (report["compiled"], report["reused"]) == (VARIANTS - stored, stored)
    assert not store_of(config).journal_path(identity_of(config)).exists()
    assert run(["verify", str(config)]) == errors.EXIT_OK


def until(warmup: subprocess.Popen[str], config: Path, *, stored: int) -> None:
    """Waits until a warmup has begun and `stored` artifacts are there."""
    assert warmup.stderr is not None
    assert warmup.stderr.readline() == f"cpu: {VARIANTS} variants; compiling\n"
    wait_for(lambda: len(artifacts_in(config.parent / "store")) >= stored)


@pytest.mark.once
@pytest.mark.parametrize("stored", [0, *random.Random(27).sample(range(1, 8), 2)])
def test_killed(tiny_config: Path, stored: int) -> None:
    with process_group("warmup", tiny_config, "--jobs", 2) as warmup:
        until(warmup, tiny_config, stored=stored)
        os.killpg(warmup.pid, signal.SIGKILL)
        assert warmup.wait() == -signal.SIGKILL

    assert run(["verify", str(tiny_config)]) == errors.EXIT_CHECK
    finishes_only_what_is_missing(tiny_config)


def starting(warmup: subprocess.Popen[str]) -> bool:
    """Whether a worker's Python runs, which handles SIGINT or, once its imports end, does not."""
    folder = Path(f"/proc/{warmup.pid}/task/{warmup.pid}/children")
    children = [Path("/proc", child) for child in folder.read_text().split()]
    workers = [path for path in children if b"spawn_main" in (path / "cmdline").read_bytes()]
    fields = [
        line.split() for path in workers for line in (path / "status").read_text().splitlines()
    ]
    masks = [int(field[1], 16) for field in fields if field[0] in ("SigCgt:", "SigIgn:")]
    return any(mask >> (signal.SIGINT - 1) & 1 for mask in masks)


@pytest.mark.once
@pytest.mark.parametrize("moment", ["before the workers", "while they start", "on the way"])
def test_interrupted(tiny_config: Path, moment: str) -> None:
    with process_group("warmup", tiny_config, "--jobs", 2) as warmup:
        until(warmup, tiny_config, stored=3 if moment == "on the way" else 0)
        if moment == "while they start":
            wait_for(lambda: starting(warmup))
        os.killpg(warmup.pid, signal.SIGINT)
        out, err = warmup.communicate(timeout=60)

    assert warmup.returncode == errors.EXIT_INTERRUPTED
    assert not out
    assert err.lstrip() == (
        "aot-lora: interrupted; what is stored stays valid, "
        "and the next warmup goes on from there\n"
    )
    finishes_only_what_is_missing(tiny_config)
