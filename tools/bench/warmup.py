"""Warmup as a whole process: what a second one costs, how it uses the cores, its memory.

    python tools/bench/warmup.py second --preset tpu-v6e/llama-3.1-8b
    python tools/bench/warmup.py cores --platform cpu
    python tools/bench/warmup.py cores --config tools/bench/tpu-v6e-excerpt.yaml --rounds 1
    python tools/bench/warmup.py memory --platform cpu

Goals: the second warmup of a preset takes under 2 % of the cold one; all cores reach 0.85 x cores
of the sequential rate; 1,000 variants stay under 4 GiB resident.

XLA's CPU compiler uses more than one core within a single compile, so `cores` measures the
sequential rate twice: free to use all cores, and held on one.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs import write_config
from lines import child_environment, cores, emit, note
from process_tree import run_watched


def second(options: argparse.Namespace) -> None:
    """A cold warmup of a preset, then the same command again."""
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as folder:
        cold = _run(options.preset, Path(folder))
        note(f"cold: {cold.seconds:.1f} s")
        again = [_run(options.preset, Path(folder)).seconds for _ in range(options.rounds)]
    case = f"warmup/second/{options.preset}"
    emit(
        case=case,
        metric="whole process, nothing changed",
        value=statistics.median(again),
        unit="s",
        peer="the cold one",
        peer_value=cold.seconds,
    )
    # What plan/cost.py estimates from.
    count = cold.report["variants"]
    emit(case=case, metric="core-seconds a variant", value=cold.core_seconds / count, unit="s")
    emit(case=case, metric="stored a variant", value=cold.report["bytes"] // count, unit="bytes")


def use_of_cores(options: argparse.Namespace) -> None:
    """Seconds a variant, workers' start included: all cores against one worker."""
    one_core = {sorted(os.sched_getaffinity(0))[0]}
    ways = {
        "all cores": (("--jobs", str(cores())), None),
        "one worker": (("--jobs", "1"), None),
        "one worker held on one core": (("--jobs", "1"), one_core),
    }
    rounds: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        config = options.config or str(
            write_config(Path(name), variants=options.variants, platform=options.platform)
        )
        for number in range(options.rounds):
            for way, (arguments, affinity) in ways.items():
                store = Path(name) / f"{number}-{way.replace(' ', '-')}"
                took = _run(config, store, *arguments, affinity=affinity)
                rounds[way].append(took.seconds / took.report["variants"])
                note(f"{way}: {took.seconds:.1f} s, {took.core_seconds:.1f} core-seconds")
    best = {way: min(took) for way, took in rounds.items()}
    case = f"warmup/cores/{Path(config).stem}"
    ours = best.pop("all cores")
    for way, peer in best.items():
        emit(
            case=case,
            metric=f"seconds a variant on {cores()} cores",
            value=ours,
            unit="s",
            peer=way,
            peer_value=peer,
        )
        emit(case=case, metric=f"rate / cores over {way}", value=peer / ours / cores(), unit="1")


def memory(options: argparse.Namespace) -> None:
    """Peak memory of a cold warmup, parent and workers together."""
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        config = write_config(Path(name), variants=options.variants, platform=options.platform)
        command = _command(str(config), Path(name) / "store")
        peak = run_watched(command, child_environment())
    case = f"warmup/memory/{options.platform}-{options.variants}"
    emit(case=case, metric="peak resident, summed", value=peak.rss_bytes, unit="bytes")
    emit(case=case, metric="peak, shared pages once", value=peak.pss_bytes, unit="bytes")
    emit(case=case, metric="processes at most", value=peak.processes, unit="1")


def _command(config: str, store: Path, *arguments: str) -> list[str]:
    verb = [sys.executable, "-m", "aot_lora", "warmup", config, "--store", str(store)]
    return [*verb, "--format", "json", *arguments]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Took:
    """Wall clock and processor time of a whole `warmup`, workers included, and its report."""

    seconds: float
    core_seconds: float
    report: dict[str, Any]


def _run(config: str, store: Path, *arguments: str, affinity: set[int] | None = None) -> _Took:
    everywhere = os.sched_getaffinity(0)
    before, began = _core_seconds(), time.monotonic()
    os.sched_setaffinity(0, affinity or everywhere)  # the child inherits it
    try:
        done = subprocess.run(
            _command(config, store, *arguments),
            check=True,
            env=child_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
    finally:
        os.sched_setaffinity(0, everywhere)
    seconds, core_seconds = time.monotonic() - began, _core_seconds() - before
    return _Took(seconds=seconds, core_seconds=core_seconds, report=json.loads(done.stdout))


def _core_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Picks the part to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("second")
    part.add_argument("--preset", default="tpu-v6e/llama-3.1-8b")
    part.add_argument("--rounds", type=int, default=5)
    part.set_defaults(run=second)
    part = parts.add_parser("cores")
    part.add_argument("--platform", choices=("cpu", "tpu"), default="cpu")
    part.add_argument("--variants", type=int, choices=(120, 200, 1000), default=120)
    part.add_argument("--config", help="instead of generated small shapes")
    part.add_argument("--rounds", type=int, default=3)
    part.set_defaults(run=use_of_cores)
    part = parts.add_parser("memory")
    part.add_argument("--platform", choices=("cpu", "tpu"), default="cpu")
    part.add_argument("--variants", type=int, choices=(120, 200, 1000), default=1000)
    part.set_defaults(run=memory)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
