"""Warmup: what is missing is compiled on all cores and stored; then the manifest is written."""

from __future__ import annotations

import signal
import time
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnContext
from typing import Any, Protocol, cast

from pebble import ProcessExpired, ProcessPool

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, IntegrityError, ProgramError, StoreError
from aot_lora.plan import TargetSpec, Variant, usable_cores
from aot_lora.store import Entry, LocalStore, Manifest
from aot_lora.store.manifest import FORMAT
from aot_lora.store.warm import WarmIdentity
from aot_lora.warmup.job import Built, Job, build, start

# A worker is replaced after this many variants, so that compilers that keep memory give it back.
_VARIANTS_PER_WORKER = 400


class Progress(Protocol):
    """Told what happens; the command line draws a bar from it."""

    def begin(self, target: TargetSpec, *, total: int, reused: int) -> None: ...
    def waiting(self, target: TargetSpec) -> None: ...
    def built(self, built: Built) -> None: ...
    def failed(self, variant: Variant, error: AotLoraError) -> None: ...
    def set_aside(self, path: str) -> None: ...


class Quiet:
    """A `Progress` that says nothing."""

    def begin(self, target: TargetSpec, *, total: int, reused: int) -> None:
        """Says nothing."""

    def waiting(self, target: TargetSpec) -> None:
        """Says nothing."""

    def built(self, built: Built) -> None:
        """Says nothing."""

    def failed(self, variant: Variant, error: AotLoraError) -> None:
        """Says nothing."""

    def set_aside(self, path: str) -> None:
        """Says nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a warmup did, for one target or summed over several.

    Args:
      points: of the plan's grid; variants: executables they fold into.
      traced, compiled: how many variants were; reused: how many needed no compile.
      failed: (variant, reason) of those that have no artifact.
      seconds: wall time; bytes: size of the plan's artifacts on disk.
    """

    points: int
    variants: int
    traced: int
    compiled: int
    reused: int
    failed: tuple[tuple[str, str], ...]
    seconds: float
    bytes: int


def warmup(
    config: Config,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Fills the store for every target of a config. What is there and whole is kept.

    Worker processes are spawned, so a script that calls this needs the usual
    ``if __name__ == "__main__":``.

    Args:
      config: from `load_config`.
      jobs: worker processes; all usable cores unless given.
      progress: told what happens.

    Raises:
      UnsupportedError: this host cannot compile for a target, or the store cannot be written.
    """
    began = time.perf_counter()
    reports = [_warm_target(config, t, jobs, progress or Quiet()) for t in config.targets]
    return Report(
        points=sum(report.points for report in reports),
        variants=sum(report.variants for report in reports),
        traced=sum(report.traced for report in reports),
        compiled=sum(report.compiled for report in reports),
        reused=sum(report.reused for report in reports),
        failed=tuple(failure for report in reports for failure in report.failed),
        seconds=round(time.perf_counter() - began, 3),
        bytes=sum(report.bytes for report in reports),
    )


def _warm_target(
    config: Config, target: TargetSpec, jobs: int | None, progress: Progress
) -> Report:
    began = time.perf_counter()
    warm = WarmIdentity.of(config, target)
    store = LocalStore(config.store_root)
    variants = config.plan.variants
    with store.writing(on_wait=lambda: progress.waiting(target)):
        entries = dict(_whole_entries(store, warm, variants, progress))
        reused = len(entries)
        missing = [variant for variant in variants if variant.name not in entries]
        progress.begin(target, total=len(variants), reused=reused)
        compiled = 0
        failed: list[tuple[str, str]] = []
        if missing:
            job = Job(config=config, target=target, parts=warm.target_parts)
            workers = min(jobs or _default_jobs(target), len(missing))
            for variant, outcome in _build_all(job, missing, workers):
                if isinstance(outcome, AotLoraError):
                    failed.append((variant.name, str(outcome)))
                    progress.failed(variant, outcome)
                    continue
                entries[variant.name] = outcome.entry
                store.append_journal(warm.identity, outcome.entry)
                compiled += outcome.compiled
                progress.built(outcome)
        ordered = tuple(entries[v.name] for v in variants if v.name in entries)
        if not failed and (missing or not store.manifest_path(warm.identity).exists()):
            manifest = Manifest(
                format=FORMAT, config=config.path.name, parts=warm.parts, entries=ordered
            )
            store.write_manifest(warm.identity, manifest)
    return Report(
        points=config.plan.points,
        variants=len(variants),
        traced=len(missing),
        compiled=compiled,
        reused=len(ordered) - compiled,
        failed=tuple(failed),
        seconds=round(time.perf_counter() - began, 3),
        bytes=sum(size for _, size in {(entry.key, entry.bytes) for entry in ordered}),
    )


def _default_jobs(target: TargetSpec) -> int:
    # XLA's autotuner times kernels on the one GPU: a second process would spoil its timings.
    return 1 if target.platform == "cuda" else usable_cores()


def _whole_entries(
    store: LocalStore, warm: WarmIdentity, variants: tuple[Variant, ...], progress: Progress
) -> Iterator[tuple[str, Entry]]:
    """Entries of the manifest or journal whose artifacts are whole; others are set aside."""
    try:
        manifest = store.read_manifest(warm.identity)
    except IntegrityError:
        manifest = None
    entries = manifest.entries if manifest else store.read_journal(warm.identity)
    names = {variant.name for variant in variants}
    for entry in entries:
        try:
            store.read_entry(entry)
        except IntegrityError:
            # A whole one that another warmup rebuilt stays: the worker takes or refuses it.
            aside = None if store.is_whole(entry.key) else store.set_aside(entry.key)
            if aside is not None:
                progress.set_aside(str(aside))
            continue
        if entry.variant in names:
            yield entry.variant, entry


def _build_all(
    job: Job, variants: list[Variant], workers: int
) -> Iterator[tuple[Variant, Built | AotLoraError]]:
    """Builds variants in worker processes; one that dies takes only its own variant with it."""
    with ProcessPool(
        max_workers=workers,
        max_tasks=_VARIANTS_PER_WORKER,
        initializer=start,
        initargs=(job,),
        context=cast("Any", _Spawn()),
    ) as pool:
        try:
            with _interrupts_held_back():
                futures: dict[Any, Variant] = {pool.schedule(build, args=(v,)): v for v in variants}
            for future in as_completed(futures):
                variant = futures[future]
                try:
                    yield variant, future.result()
                except ProgramError as error:
                    yield variant, error
                except ProcessExpired as error:
                    yield variant, _died(variant, error)
                except CancelledError:
                    continue
        except BaseException:
            pool.stop()
            raise


class _Spawn(SpawnContext):
    """Holds its locks: pebble drops them before it stops workers that may still be starting."""

    def __init__(self) -> None:
        self._held: list[Any] = []

    def RLock(self) -> Any:  # noqa: N802
        lock = super().RLock()
        self._held.append(lock)
        return lock


@contextmanager
def _interrupts_held_back() -> Generator[None]:
    """Ctrl-C waits, and never reaches the processes and threads that are started inside.

    It is the parent's to handle, and a worker cannot ignore it before its imports are done.
    """
    resource_tracker.ensure_running()  # Else it starts inside, and lifts the mask.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _died(variant: Variant, error: ProcessExpired) -> ProgramError:
    return ProgramError(
        "the compiler ended its process",
        where=variant.name,
        found=f"exit code {error.exitcode}",
        next_step="the other variants are built; run warmup again to retry this one alone",
    )


__all__ = ["Progress", "Quiet", "Report", "StoreError", "warmup"]
