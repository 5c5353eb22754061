"""Processes that trace: for both cores, for another hash seed, or from another checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aot_lora.checking import child
from aot_lora.config import Config
from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.lowering.lock import LockLine
from aot_lora.plan import usable_cores

PACKAGE = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A variant that could not be traced.

    Args:
      error: why.
      traceback: the frames of the user's own files, or nothing.
    """

    error: AotLoraError
    traceback: str = ""

    def __str__(self) -> str:
        return "\n".join(filter(None, [str(self.error), self.traceback]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """What became of the variants of a config.

    Args:
      lines: target -> variant -> line.
      failures: by ``target variant``.
      warnings: what to tell of some.
      modules: the files outside of any installation that were imported, with their digests.
    """

    lines: dict[str, dict[str, LockLine]]
    failures: dict[str, Failure] = field(default_factory=dict[str, Failure])
    warnings: tuple[str, ...] = ()
    modules: dict[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What one process is to trace.

    Args:
      config: the config's file.
      store: overrides the store's folder.
      names: target -> variants; all of the plan unless given.
      part: every how manieth of them, from which on.
      folder: for the StableHLO of each, or None.
      package: the folder that holds the aot-lora to use.
      paths: where to look for modules, after that.
      cwd: where to run; here unless given.
      environ: variables that differ from those of this process.
    """

    config: Path
    store: str | None = None
    names: Mapping[str, Sequence[str]] | None = None
    part: tuple[int, int] = (0, 1)
    folder: Path | None = None
    package: Path = PACKAGE.parent
    paths: tuple[str, ...] = ()
    cwd: Path | None = None
    environ: Mapping[str, str] = field(default_factory=dict[str, str])


def run_all(requests: Sequence[Request]) -> list[Traced]:
    """Runs requests, as many side by side as there are cores.

    Raises:
      AotLoraError: a process ended without doing what it was asked.
    """
    with ThreadPoolExecutor(usable_cores()) as threads:  # A pipe that nobody reads would fill up.
        return list(threads.map(_run, requests))


def merged(config: Config, found: Sequence[Traced]) -> Traced:
    """Parts of a plan as one, in the plan's order."""
    names = [variant.name for variant in config.plan.variants]
    lines = {
        target: {
            n: one.lines[target][n]
            for n in names
            for one in found
            if n in one.lines.get(target, ())
        }
        for target in map(str, config.targets)
    }
    failures = {name: failure for one in found for name, failure in one.failures.items()}
    return Traced(
        lines=lines,
        failures=failures,
        warnings=tuple(warning for one in found for warning in one.warnings),
        modules={path: digest for one in found for path, digest in one.modules.items()},
    )


def _run(request: Request) -> Traced:
    paths = (str(request.package), *request.paths, os.environ.get("PYTHONPATH", ""))
    asked = {
        "config": str(request.config.absolute()),
        "store": request.store,
        "names": request.names,
        "part": request.part,
        "folder": str(request.folder) if request.folder else None,
    }
    done = subprocess.run(
        # Not by its module's name, which another checkout may not have; -P: nor from its folder.
        [sys.executable, "-P", child.__file__],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        check=False,
        cwd=request.cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **request.environ},
    )
    answers: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or not answers or "modules" not in answers[-1]:
        last = answers[-1] if answers else {}
        raise AotLoraError(
            "a process that traces ended before it was done",
            where=str(request.config),
            found=f"exit code {done.returncode}"
            + (f", after {last['target']} {last['name']}" if "name" in last else "")
            + "".join(f"\n    {line}" for line in done.stderr.strip().splitlines()[-12:]),
            next_step="see what it says; --no-cache and a smaller plan help to find the variant",
        )
    lines: dict[str, dict[str, LockLine]] = {}
    failures: dict[str, Failure] = {}
    warnings: list[str] = []
    for answer in answers[:-1]:
        ours = lines.setdefault(answer["target"], {})
        if "error" in answer:
            failures[f"{answer['target']} {answer['name']}"] = Failure(
                error=ProgramError(answer["error"], **answer["fields"]),
                traceback=answer["traceback"],
            )
        elif answer["line"] is None:
            ours[answer["name"]] = LockLine(fingerprint="", signature="")
        else:
            ours[answer["name"]] = LockLine(**answer["line"])
            if answer["warning"]:
                warnings.append(answer["warning"])
    return Traced(
        lines=lines,
        failures=failures,
        warnings=tuple(warnings),
        modules=answers[-1]["modules"],
    )
