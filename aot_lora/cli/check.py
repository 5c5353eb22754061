"""`aot-lora check`: has a trace moved, and why?"""

from __future__ import annotations

import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aot_lora import errors
from aot_lora.cli.check_report import FORMATS, Checked, default_format, report
from aot_lora.cli.options import backend, note, read_config
from aot_lora.lowering.compare import Comparison, compare, groups
from aot_lora.lowering.lock import Lock, Traces, dump_lock, read_lock, series_of

if TYPE_CHECKING:
    from aot_lora.checking.processes import Failure
    from aot_lora.config import Config

_DIFFS = 5


@click.command()
@click.argument("configs", nargs=-1, required=True, metavar="CONFIG...")
@click.option("--store", metavar="DIR", help="The store's folder.")
@click.option("--format", "form", type=click.Choice(FORMATS), default=default_format)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.option("--update", is_flag=True, help="Write the lock instead of comparing with it.")
@click.option(
    "--beside",
    is_flag=True,
    help="Write only what another JAX than the lock's makes otherwise, in a section of its own.",
)
@click.option("--twice", is_flag=True, help="Trace in two processes, and report what differs.")
@click.option("--diff", is_flag=True, help="Show how the IR of what moved differs from --base.")
@click.option("--base", metavar="REV|DIR", default="HEAD", help="A git revision or a checkout.")
@click.option("--junit", metavar="FILE", help="Write the result as JUnit XML, too.")
@click.option("--no-cache", is_flag=True, help="Trace even where nothing has changed.")
@backend
def command(
    configs: tuple[str, ...],
    store: str | None,
    form: str,
    debug: bool,
    update: bool,
    beside: bool,
    twice: bool,
    diff: bool,
    base: str,
    junit: str | None,
    no_cache: bool,
    backend: str,
) -> int:
    """Trace every variant of each CONFIG and compare with the .lock.json beside it."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Tracing needs no device of the target.
    torch_xla = backend == "torch_xla"
    if torch_xla and (beside or twice or diff):
        raise click.UsageError("--beside, --twice and --diff are of --backend jax")
    checked: list[Checked] = []
    for name in configs:
        try:
            loaded = read_config(name, store)
            if torch_xla:
                one = _check_torch_xla(loaded, update)
            else:
                one = _check(loaded, store, update or beside, beside, twice, not no_cache)
            if diff and one.found:
                one = one.with_diffs(_diffs(one, base))
        except errors.AotLoraError as error:
            if debug:
                traceback.print_exc()
            one = Checked(name=name, error=error)
        checked.append(one)
    report(checked, form, Path(junit) if junit else None)
    codes = [one.exit_code for one in checked]
    return next((c for c in codes if c not in (errors.EXIT_OK, errors.EXIT_CHECK)), max(codes))


def _check(
    config: Config, store: str | None, update: bool, beside: bool, twice: bool, use_cache: bool
) -> Checked:
    from aot_lora.checking.check import jax_version, traces_of
    from aot_lora.targets.identity import jax_environment

    path = config.lock_path
    lock = _written(path) if update else read_lock(path)
    if twice:
        from aot_lora.checking.twice import trace_twice

        traced, differing = trace_twice(config, store=store)
    else:
        traced, differing = traces_of(config, store=store, use_cache=use_cache), ()
    for warning in traced.warnings:
        note(f"warning: {warning}")
    plan, jax, options = config.plan.digest(), jax_version(), jax_environment()
    if update and not traced.failures:
        if beside:
            lock = read_lock(path)  # There has to be one.
        text = (
            _beside(lock, traced.lines, jax)
            if beside and lock
            else _anew(lock, _and_others(lock, traced.lines, plan), plan, jax, options)
        )
        _write(path, text)
        note(f"wrote {path}")
        lock = read_lock(path)
    left_alone, found = update and bool(traced.failures), None
    if lock is not None and not left_alone:
        untraced, own = frozenset(traced.failures), lock.of(torch_xla=False)
        found = compare(own, traced.lines, plan=plan, untraced=untraced, jax=jax, options=options)
    checked = _checked(config, found, traced.failures, left_alone)
    return replace(checked, differing=differing)


def _check_torch_xla(config: Config, update: bool) -> Checked:
    """As `_check` for the graphs of torch_xla, in whose environment is no JAX that traces."""
    from aot_lora.checking.processes import Failure
    from aot_lora.interop.torch_xla.check import trace_all

    path, plan = config.lock_path, config.plan.digest()
    lock = _written(path) if update else read_lock(path)
    lines, errors = trace_all(config)
    failures = {name: Failure(error=error) for name, error in errors.items()}
    if update and not failures:
        jax, options = (lock.jax, lock.options) if lock else ("", "")
        traces = _and_others(lock, lines, plan, torch_xla=True)
        _write(path, _anew(lock, traces, plan, jax, options))
        note(f"wrote {path}")
        lock = read_lock(path)
    left_alone, found = update and bool(failures), None
    if lock is not None and not left_alone:
        own, untraced = lock.of(torch_xla=True), frozenset(failures)
        found = compare(
            own, lines, plan=plan, untraced=untraced, jax=lock.jax, options=lock.options
        )
    return _checked(config, found, failures, left_alone)


def _checked(
    config: Config,
    found: Comparison | None,
    failures: Mapping[str, Failure],
    left_alone: bool,
) -> Checked:
    return Checked(
        name=config.path.name if found is None else str(config.lock_path),
        config=config,
        found=found,
        groups=groups(found) if found else (),
        failures=failures,
        left_alone=left_alone,
    )


def _and_others(old: Lock | None, lines: Traces, plan: str, *, torch_xla: bool = False) -> Traces:
    """One backend's traces, and what the other has locked of the same plan."""
    if old is None or old.plan != plan:
        return lines
    return {**old.of(torch_xla=not torch_xla).traces, **lines}


def _written(path: Path) -> Lock | None:
    """The lock as it was, if it can be read: one that cannot is written anew."""
    try:
        return read_lock(path)
    except errors.AotLoraError:
        return None


def _anew(old: Lock | None, traces: Traces, plan: str, jax: str, options: str) -> str:
    """The lock of these traces. Another JAX that makes the same ones leaves it as it was."""
    if old and old.options == options and old.under(jax) == traces:
        return dump_lock(old.traces, plan=plan, jax=old.jax, options=options, beside=old.beside)
    others = {**old.beside} if old else {}
    others.pop(series_of(jax), None)
    return dump_lock(traces, plan=plan, jax=jax, options=options, beside=others)


def _beside(old: Lock, traces: Traces, jax: str) -> str:
    own = {
        target: {n: line for n, line in lines.items() if old.traces.get(target, {}).get(n) != line}
        for target, lines in traces.items()
    }
    own = {target: lines for target, lines in own.items() if lines}
    others = {name: lines for name, lines in old.beside.items() if name != series_of(jax)}
    return dump_lock(
        old.traces,
        plan=old.plan,
        jax=old.jax,
        options=old.options,
        beside=others | ({series_of(jax): own} if own else {}),
    )


def _write(path: Path, text: str) -> None:
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise errors.StoreError(
            f"the lock cannot be written: {error.strerror}", where=str(path)
        ) from None


def _diffs(one: Checked, base: str) -> dict[str, tuple[str, ...]]:
    """The diff of the first variant of each group that moved, by its name."""
    from aot_lora.checking.base import diffs_to

    first = [group.names[0] for group in one.groups if group.kind == "moved"][:_DIFFS]
    if not first or one.config is None:
        return {}
    names: dict[str, list[str]] = {}
    for name in first:
        target, _, variant = name.rpartition(" ")
        names.setdefault(target, []).append(variant)
    wanted: Mapping[str, Sequence[str]] = names
    return diffs_to(one.config, base, wanted)
