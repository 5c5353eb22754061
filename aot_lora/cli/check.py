"""`aot-lora check`: has a trace moved?"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from aot_lora import errors
from aot_lora.cli.options import backend, common, emit, note, read_config
from aot_lora.lowering.lock import Comparison, Traces, compare, dump_lock, read_lock

_SHOWN = 5


@click.command()
@common
@click.option("--update", is_flag=True, help="Write the lock instead of comparing with it.")
@backend
def command(
    config: str, store: str | None, form: str, debug: bool, update: bool, backend: str
) -> int:
    """Trace every variant of CONFIG and compare with the .lock.json beside it."""
    del debug
    os.environ.setdefault("JAX_PLATFORMS", "cpu")  # Tracing needs no device of the target.
    loaded = read_config(config, store)
    path = loaded.lock_path
    lock = None if update else read_lock(path)
    torch_xla = backend == "torch_xla"
    if torch_xla:
        from aot_lora.interop.torch_xla.check import trace_all

        traces, failures = trace_all(loaded)
    else:
        from aot_lora.lowering.check import trace_all

        traces, failures = trace_all(loaded, warn=lambda text: note(f"warning: {text}"))
    for failure in failures.values():
        note(str(failure))
    plan = loaded.plan.digest()
    if update:
        if failures:
            note("the lock is left as it was: some variants cannot be traced")
            return next(iter(failures.values())).exit_code
        _write(path, dump_lock({**_others(path, plan, torch_xla), **traces}, plan=plan))
        note(f"wrote {path}")
        lock = read_lock(path)
    assert lock is not None
    result = compare(lock.of(torch_xla=torch_xla), traces, plan=plan, untraced=frozenset(failures))
    _report(result, path, form, failed=len(failures))
    return errors.EXIT_OK if result.holds and not failures else errors.EXIT_CHECK


def _others(path: Path, plan: str, torch_xla: bool) -> Traces:
    """What the other backend has locked of the same plan, to be kept."""
    if not path.exists():
        return {}
    lock = read_lock(path).of(torch_xla=not torch_xla)
    return lock.traces if lock.plan == plan else {}


def _write(path: Path, text: str) -> None:
    try:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise errors.StoreError(
            f"the lock cannot be written: {error.strerror}", where=str(path)
        ) from None


def _report(result: Comparison, path: Path, form: str, *, failed: int) -> None:
    counts = {
        "variants": len(result.stable)
        + len(result.moved)
        + len(result.missing)
        + len(result.new)
        + failed,
        "stable": len(result.stable),
        "moved": len(result.moved),
        "missing": len(result.missing),
        "stale": len(result.stale),
        "new": len(result.new),
    }
    if form == "json":
        emit(counts)
    else:
        print(f"{path}: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    for moved in result.moved[:_SHOWN]:
        note(f"  moved {moved.name}: {moved.cause}")
    for kind in ("missing", "new", "stale"):
        for name in getattr(result, kind)[:_SHOWN]:
            note(f"  {kind} {name}")
    hidden = sum(
        max(0, len(getattr(result, kind)) - _SHOWN) for kind in ("moved", "missing", "new", "stale")
    )
    if hidden:
        note(f"  and {hidden} more")
    if not result.holds:
        note("  next: undo what moved them, or accept with `aot-lora check --update`")
    sys.stdout.flush()
