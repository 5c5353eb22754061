"""`aot-lora check`: how long it takes, what alarms it, and whether it names the cause.

    python tools/bench/check.py speed
    python tools/bench/check.py edits

Goals: 400 variants of the v6e preset on two cores in under 15 s, and under 2 s when nothing has
changed that they depend on; no alarm over benign edits of a small engine with kernels for TPUs and
GPUs, and of each harmful one the cause. Each edit is
checked by a process of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from check_edits import BENIGN, HARMFUL, Edit, copy_engine
from lines import ROOT, child_environment, emit, note

_GOAL_COLD_SECONDS, _GOAL_UNCHANGED_SECONDS = 15, 2
_PRESET = ROOT / "buckets/tpu-v6e/llama-3.1-8b.yaml"
# 400 of its 560 variants: without the smallest token buckets and the most adapters.
_SMALLER = (("slots: [0, 1, 2, 4, 8]", "slots: [0, 1, 2, 4]"), ("smallest: 16", "smallest: 64"))


def speed(options: argparse.Namespace) -> None:
    """Seconds of the whole process, cold and with nothing changed."""
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as folder:
        config = Path(folder) / "llama.yaml"
        text = _PRESET.read_text(encoding="utf-8")
        for old, new in _SMALLER:
            assert old in text
            text = text.replace(old, new)
        config.write_text(text, encoding="utf-8")
        written = _check(config.parent, [config], "--update")
        count = int(re.findall(r"(\d+) variants", written.stdout)[0])
        assert count == 400
        cold, unchanged = [], []
        for _ in range(options.rounds):
            cold.append(_seconds(config, "--no-cache"))
            unchanged.append(_seconds(config))
        case = f"check/v6e-{count}"
        emit(
            case=case,
            metric="cold, whole process",
            value=min(cold),
            unit="s",
            peer="goal",
            peer_value=_GOAL_COLD_SECONDS,
        )
        emit(
            case=case,
            metric="nothing changed, whole process",
            value=min(unchanged),
            unit="s",
            peer="goal",
            peer_value=_GOAL_UNCHANGED_SECONDS,
        )


def _seconds(config: Path, *more: str) -> float:
    start = time.perf_counter()
    done = _check(config.parent, [config], *more)
    assert done.returncode == 0, done.stderr
    return time.perf_counter() - start


def edits(options: argparse.Namespace) -> None:
    """False alarms over benign edits, and harmful ones whose cause is named."""
    del options
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as folder:
        base = Path(folder) / "base"
        copy_engine(base)
        configs = sorted(base.glob("*.yaml"))
        assert _check(base, configs, "--update").returncode == 0
        alarms = [edit.name for edit in BENIGN if _edited(Path(folder), base, edit) != (0, "")]
        unnamed = [edit.name for edit in HARMFUL if not _named(Path(folder), base, edit)]
    for name in (*alarms, *unnamed):
        note(f"wrong: {name}")
    emit(case="check/benign-edits", metric=f"alarms of {len(BENIGN)}", value=len(alarms), unit="1")
    named = len(HARMFUL) - len(unnamed)
    emit(case="check/harmful-edits", metric=f"named of {len(HARMFUL)}", value=named, unit="1")
    if alarms or unnamed:
        sys.exit(1)


def _named(folder: Path, base: Path, edit: Edit) -> bool:
    code, said = _edited(folder, base, edit)
    return code == 3 and edit.cause in said


def _edited(folder: Path, base: Path, edit: Edit) -> tuple[int, str]:
    """The exit code of `check` after an edit of a copy, and what it says on stderr."""
    copy = folder / edit.folder
    shutil.copytree(base, copy)
    try:
        edit.apply(copy)
        cwd = folder if edit.cwd else copy
        done = _check(cwd, sorted(copy.glob("*.yaml")), **edit.environ)
        said = "\n".join(line for line in done.stderr.splitlines() if not _noise(line))
        note(f"{edit.name}: {done.returncode} {said[:200]}")
        return done.returncode, said
    finally:
        shutil.rmtree(copy)


def _noise(line: str) -> bool:
    """What JAX logs, or warns of."""
    return "Warning" in line or line.startswith(
        ("WARNING", "DEBUG", "INFO", "    return", "  warn")
    )


def _check(
    cwd: Path, configs: list[Path], *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "aot_lora", "check", *map(str, configs), *options],
        cwd=cwd,
        env=child_environment(**environ, COLUMNS=os.environ.get("COLUMNS", "100")),
        capture_output=True,
        text=True,
        check=False,
    )


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    timed = verbs.add_parser("speed", help=speed.__doc__)
    timed.add_argument("--rounds", type=int, default=3)
    timed.set_defaults(run=speed)
    verbs.add_parser("edits", help=edits.__doc__).set_defaults(run=edits)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
