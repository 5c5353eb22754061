"""Records what the autotuner of a GPU chooses for a plan's matmuls, for builds without the GPU."""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, ConfigError, StoreError, UnsupportedError
from aot_lora.plan import TargetSpec, Variant
from aot_lora.warmup.compile import compile_lowered
from aot_lora.warmup.job import Job, this_worker
from aot_lora.warmup.pool import run_all

# Of XLA's text: where each result begins, and what it is looked up by.
_RESULT = re.compile(r"(?m)^(?=\w+ \{)")
_KEY = re.compile(r'(?m)^  (?:device|hlo): "(?:[^"\\]|\\.)*"')


@dataclass(frozen=True, slots=True, kw_only=True)
class AutotuneReport:
    """What was recorded.

    Args:
      variants: how many were compiled.
      results: of distinct matmuls; the plan's kernels share them.
      seconds: wall time.
      path: the file.
    """

    variants: int
    results: int
    seconds: float
    path: Path


def autotune(config: Config, *, on_done: Callable[[], None] = lambda: None) -> AutotuneReport:
    """Compiles the plan on this host's GPU, keeps nothing of it but the autotuner's choices.

    One process, because a second would spoil the timings.

    Args:
      config: from `load_config`; one of its targets has a GPU's topology.
      on_done: called after each variant.

    Raises:
      ConfigError: no target has a GPU's topology; ProgramError: a variant does not compile.
      UnsupportedError: this host has no GPU, or another one; StoreError: the file cannot be
      written.
    """
    began = time.perf_counter()
    target = _with_topology(config)
    at_hand = TargetSpec("cuda", devices=target.devices)
    variants = list(config.plan.variants)
    with tempfile.TemporaryDirectory(prefix="aot-lora-") as folder:
        job = Job(config=config, target=at_hand, parts={}, record=Path(folder))
        for outcome in run_all(job, _tune, variants, 1):
            if isinstance(outcome, AotLoraError):
                raise outcome
            on_done()
        found = [path.read_text(encoding="utf-8") for path in sorted(Path(folder).iterdir())]
    text, count = merged(found)
    if not count:
        raise UnsupportedError(
            "the autotuner had nothing to choose",
            where=str(config.path),
            next_step="warm up without recorded results: they would change nothing",
        )
    path = config.autotune_path
    _write(path, text)
    seconds = round(time.perf_counter() - began, 3)
    return AutotuneReport(variants=len(variants), results=count, seconds=seconds, path=path)


def merged(texts: Iterable[str]) -> tuple[str, int]:
    """One text of the results of several processes, each matmul's once, and how many there are."""
    head, results = "", dict[str, str]()
    for text in texts:
        first, *blocks = _RESULT.split(text)
        head = head or first
        for block in blocks:
            results.setdefault(" ".join(_KEY.findall(block)) or block, block.rstrip() + "\n")
    return head + "".join(results[key] for key in sorted(results)), len(results)


def _with_topology(config: Config) -> TargetSpec:
    for target in config.targets:
        if target.target_config:
            return target
    raise ConfigError(
        "no target that is compiled for without its GPU",
        where=str(config.path),
        expected="target: {platform: cuda, topology: ...}",
        found=", ".join(map(str, config.targets)),
        next_step="name the GPU's topology; on the GPU at hand XLA autotunes as it compiles",
    )


def _tune(variant: Variant) -> None:
    worker = this_worker()
    _check_once()
    compile_lowered(variant, worker.trace(variant).lowered)


@cache
def _check_once() -> None:
    from aot_lora.targets.cuda import check_gpus

    worker = this_worker()
    check_gpus(_with_topology(worker.job.config), worker.devices)


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise StoreError(
            f"the results cannot be written: {error.strerror}", where=str(path)
        ) from None
