"""`aot-lora warmup`: fill the store before the deploy."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict, replace

import click
from rich import progress as rich_progress
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from aot_lora import errors
from aot_lora.cli.options import backend, common, emit, note, read_config, size
from aot_lora.config.limits import hold_limits
from aot_lora.errors import AotLoraError
from aot_lora.plan import TargetSpec
from aot_lora.warmup import Progress, Report, warmup
from aot_lora.warmup.job import Built


class _Bar(Progress):
    """A progress bar on a terminal; a few lines on stderr elsewhere."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self.bar = rich_progress.Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
        )
        self.live = console.is_terminal
        self._task: TaskID | None = None
        self.unrecorded = 0

    def begin(self, target: TargetSpec, *, total: int, reused: int) -> None:
        if total == reused:
            note(f"{target}: all {total} variants are stored and whole")
            return
        done = f", {reused} of them stored already" if reused else ""
        if self.live:
            self._task = self.bar.add_task(f"compiling for {target}", total=total)
            self.bar.advance(self._task, reused)
        else:
            note(f"{target}: {total} variants{done}; compiling")

    def waiting(self, target: TargetSpec) -> None:
        note(f"{target}: another warmup is writing to this store; waiting for it")

    def built(self, built: Built) -> None:
        if built.warning:
            self._say(f"warning: {built.warning}")
        self.unrecorded += built.unrecorded
        if self._task is not None:
            self.bar.advance(self._task)

    def failed(self, error: AotLoraError) -> None:
        self._say(f"failed: {error}")
        if self._task is not None:
            self.bar.advance(self._task)

    def set_aside(self, path: str) -> None:
        self._say(f"damaged artifact set aside as {path}; its variant is rebuilt")

    def _say(self, text: str) -> None:
        if self.live:
            self.bar.console.print(text, markup=False, highlight=False)
        else:
            note(text)


@click.command()
@common
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Worker processes; all cores unless given."
)
@backend
def command(
    config: str, store: str | None, form: str, debug: bool, jobs: int | None, backend: str
) -> int:
    """Compile every variant of CONFIG that is missing into the store."""
    del debug
    loaded = read_config(config, store)
    hold_limits(loaded.asked, loaded.plan, loaded.targets, seconds=True)
    if backend == "torch_xla":
        from aot_lora.interop.torch_xla.warmup import warm_store

        return _finish(warm_store(loaded, say=note), str(loaded.store_root), form)
    bar = _Bar()
    with bar.bar if bar.live else nullcontext():
        report = warmup(loaded, jobs=jobs, progress=bar)
    if bar.unrecorded:
        note(
            f"warning: {bar.unrecorded} variants have matmuls without a recorded autotuning "
            "result, which take XLA's default; `aot-lora autotune` on the GPU records them"
        )
    return _finish(report, str(loaded.store_root), form)


def _finish(report: Report, root: str, form: str) -> int:
    if form == "json":
        emit(asdict(replace(report, failed=())) | {"failed": len(report.failed)})
    else:
        _show(report, root)
    sys.stdout.flush()
    return report.failed[0].exit_code if report.failed else errors.EXIT_OK


def _show(report: Report, root: str) -> None:
    print(
        f"{report.points} points, {report.variants} variants: {report.compiled} compiled, "
        f"{report.reused} reused, {len(report.failed)} failed, {report.traced} traced"
    )
    print(f"{report.seconds:.1f} s, {size(report.bytes)} in {root}")
