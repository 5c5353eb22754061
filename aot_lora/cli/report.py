"""`aot-lora report`: a plan as one HTML file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from aot_lora.cli.gather import gather
from aot_lora.cli.options import common, emit, memory_option, note, sequences_option, size
from aot_lora.config import Config
from aot_lora.config.limits import hold_limits
from aot_lora.config.load import read
from aot_lora.errors import ConfigError, PlanError
from aot_lora.report import PlanFacts, render
from aot_lora.warmup.fewer import refuse_what_does_not_fit
from aot_lora.warmup.memory import MemoryReport, memory_report

_STDOUT = "-"


@click.command()
@common
@click.option("-o", "--output", required=True, metavar="FILE", help="The HTML file; - is stdout.")
@memory_option
@click.option("--traffic", type=click.Path(path_type=Path), metavar="FILE",
              help="Show the token buckets under a recorded trace. [default: the one that CONFIG "
              "fits them to, if it does]")  # fmt: skip
@sequences_option
def command(
    config: str,
    store: str | None,
    form: str,
    debug: bool,
    output: str,
    memory: bool,
    traffic: Path | None,
    sequences: int | None,
) -> None:
    """Draw the plan of CONFIG and what of it is compiled as one HTML file that loads nothing.

    A plan over its limits is drawn too, and then refused as `plan` refuses it.
    """
    del debug
    if output == _STDOUT and form == "json":
        raise ConfigError(
            "both the page and its summary on stdout",
            where="-o -",
            next_step="name a file, or leave out --format json",
        )
    if traffic is None and sequences is not None:
        raise ConfigError("--sequences needs a trace", next_step="name it with --traffic")
    loaded = read(config, store=store)
    path = None if output == _STDOUT else _checked(Path(output), loaded, traffic)
    measured = [memory_report(loaded, target, say=note) for target in loaded.targets if memory]
    refused = list(_refusals(loaded, measured))
    facts = gather(loaded, traffic=traffic, sequences=sequences, measured=measured, refused=refused)
    page = render(facts).encode("utf-8", "replace")  # a name may hold half of a character
    if path is None:
        sys.stdout.buffer.write(page)
        sys.stdout.flush()
    else:
        _write(path, page)
        _say(path, page, facts, form)
    for error in refused:
        raise error


def _refusals(config: Config, measured: Sequence[MemoryReport]) -> Iterator[PlanError]:
    try:
        hold_limits(config.asked, config.plan, config.targets, seconds=True)
    except PlanError as error:
        yield error
    for report in measured:
        try:
            refuse_what_does_not_fit(config, report, say=note)
        except PlanError as error:
            yield error


def _say(path: Path, page: bytes, facts: PlanFacts, form: str) -> None:
    targets = len(facts.targets)
    known = [len(target.held) for target in facts.targets if target.held is not None]
    compiled = sum(known) if len(known) == targets else None
    points, variants = facts.plan.points * targets, len(facts.plan.variants) * targets
    if form == "json":
        emit({"path": str(path), "bytes": len(page), "points": points, "variants": variants,
              "compiled": compiled, "findings": len(facts.findings)})  # fmt: skip
    else:
        state = "an unknown number" if compiled is None else f"{compiled}"
        print(
            f"{path}: {points} points, {variants} variants, {state} compiled, "
            f"{len(facts.findings)} findings; {size(len(page))}"
        )
    sys.stdout.flush()


def _checked(path: Path, config: Config, traffic: Path | None) -> Path:
    """The file to write: not a folder, and nothing that is read."""
    if path.is_dir():
        raise ConfigError(
            "the output is a folder",
            where=str(path),
            expected="a file's name",
            next_step=f"name {path / 'plan.html'}",
        )
    if not path.parent.is_dir():
        raise ConfigError(
            "no such folder", where=str(path.parent), next_step="make it, or name another"
        )
    for source in (config.path, traffic):
        if source is not None and path.exists() and source.exists() and path.samefile(source):
            raise ConfigError(
                "the output is what the report is made of",
                where=str(path),
                next_step="name another file, such as plan.html",
            )
    return path


def _write(path: Path, page: bytes) -> None:
    """Writes the file whole or not at all; a pipe or a device is written to as it is."""
    aim = path.resolve()  # a link stays one
    beside = aim.with_name(f".{aim.name}.{os.getpid()}.new")
    try:
        if aim.exists() and not aim.is_file():
            aim.write_bytes(page)
            return
        beside.write_bytes(page)
        beside.replace(aim)
    except OSError as error:
        raise ConfigError(
            f"cannot be written: {error.strerror}",
            where=str(path),
            next_step="name a file that can, or - for stdout",
        ) from None
    finally:
        beside.unlink(missing_ok=True)
