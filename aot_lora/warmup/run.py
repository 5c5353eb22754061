"""Warmup: what is missing is compiled on all cores and stored; then the manifest is written."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, IntegrityError
from aot_lora.plan import TargetSpec, Variant, usable_cores
from aot_lora.store import Entry, LocalStore, Manifest
from aot_lora.store.manifest import FORMAT
from aot_lora.store.misses import widened
from aot_lora.store.warm import WarmIdentity
from aot_lora.warmup.job import Built, Job, build
from aot_lora.warmup.pool import run_all


class Progress:
    """Told what happens; says nothing itself. The command line draws a bar from it."""

    def begin(self, target: TargetSpec, *, total: int, reused: int) -> None:
        """A target's warmup begins: `reused` of its `total` variants are stored and whole."""

    def waiting(self, target: TargetSpec) -> None:
        """Another warmup is writing to the store."""

    def built(self, built: Built) -> None:
        """A variant's artifact is stored."""

    def failed(self, error: AotLoraError) -> None:
        """A variant has no artifact; the error says why."""

    def set_aside(self, path: str) -> None:
        """A damaged artifact was moved to `path`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a warmup did, for one target or summed over several.

    Args:
      points: of the plan's grid; variants: executables they fold into.
      traced, compiled: how many variants were; reused: how many needed no compile.
      failed: one error for each variant that has no artifact.
      seconds: wall time; bytes: size of the plan's artifacts on disk.
    """

    points: int
    variants: int
    traced: int
    compiled: int
    reused: int
    failed: tuple[AotLoraError, ...]
    seconds: float
    bytes: int


def warmup(
    config: Config,
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Fills the store for every target of a config. What is there and whole is kept.

    Under `on_miss: background`, buckets that servers missed come with it.

    Worker processes are spawned, so a script that calls this needs the usual
    ``if __name__ == "__main__":``.

    Args:
      config: from `load_config`.
      jobs: worker processes; all usable cores unless given.
      progress: told what happens.

    Raises:
      UnsupportedError: this host cannot compile for a target, or the store cannot be written.
      IntegrityError: what servers missed is recorded in a damaged file.
    """
    began = time.perf_counter()
    config = widened(config)
    reports = [_warm_target(config, t, jobs, progress or Progress()) for t in config.targets]
    return replace(total(reports), seconds=round(time.perf_counter() - began, 3))


def total(reports: Sequence[Report]) -> Report:
    """What warmups did together."""
    return Report(
        points=sum(report.points for report in reports),
        variants=sum(report.variants for report in reports),
        traced=sum(report.traced for report in reports),
        compiled=sum(report.compiled for report in reports),
        reused=sum(report.reused for report in reports),
        failed=tuple(failure for report in reports for failure in report.failed),
        seconds=round(sum(report.seconds for report in reports), 3),
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
        failed: list[AotLoraError] = []
        if missing:
            job = Job(config=config, target=target, parts=warm.target_parts)
            workers = min(jobs or _default_jobs(target), len(missing))
            for outcome in run_all(job, build, missing, workers):
                if isinstance(outcome, AotLoraError):
                    failed.append(outcome)
                    progress.failed(outcome)
                    continue
                entries[outcome.entry.variant] = outcome.entry
                store.append_journal(warm.identity, outcome.entry)
                compiled += outcome.compiled
                if outcome.set_aside:
                    progress.set_aside(outcome.set_aside)
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
    at_hand = target.platform == "cuda" and not target.deviceless
    return 1 if at_hand else usable_cores()


def _whole_entries(
    store: LocalStore, warm: WarmIdentity, variants: tuple[Variant, ...], progress: Progress
) -> Iterator[tuple[str, Entry]]:
    """Entries of the manifest and journal whose artifacts are whole; others are set aside."""
    try:
        manifest = store.read_manifest(warm.identity)
    except IntegrityError:
        manifest = None
    entries = (*(manifest.entries if manifest else ()), *store.read_journal(warm.identity))
    names = {variant.name for variant in variants}
    for entry in entries:
        try:
            store.read_entry(entry)
        except IntegrityError:
            aside = store.set_aside(entry.key)
            if aside is not None:
                progress.set_aside(str(aside))
            continue
        if entry.variant in names:
            yield entry.variant, entry
