"""`aot-lora capture`: what does a program compile, and is all of it in the lock?"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from aot_lora import errors
from aot_lora.capture.lock import CaptureLock, Unheld, lock_of, read, unheld, write
from aot_lora.capture.records import Records, read_records
from aot_lora.capture.run import run_recorded
from aot_lora.cli.options import FORMATS, emit, note, table

if TYPE_CHECKING:
    from aot_lora.capture.reasons import New
    from aot_lora.capture.summary import FunctionSummary

_ROWS = 20
_FUNCTIONS = 6  # whose repeats are shown
_REPEATS = 4
_NEW = 10
_COUNTED = {
    "compiles": "compile",
    "cache_hits": "cache hit",
    "programs": "program",
    "processes": "process",
}


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("-o", "--output", metavar="FILE", help="Write a lock of what was compiled.")
@click.option("--against", metavar="LOCK", help="Fail if something else than that is compiled.")
@click.option("--records", metavar="FILE", help="Keep each compile as a line of JSON.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def command(
    output: str | None,
    against: str | None,
    records: str | None,
    form: str,
    debug: bool,
    command: tuple[str, ...],
) -> int:
    """Run COMMAND and record every compile of JAX in it and in the processes it starts.

    The exit code is COMMAND's, 128 and the signal's number where a signal ended it. Where that is
    0: 3 if --against does not hold or nothing could be recorded, 5 if some compile could not be.
    """
    del debug
    if not command:
        raise click.UsageError("no command: aot-lora capture [options] -- python -m my_server ...")
    lock = read(Path(against)) if against else None
    for path in filter(None, (output, records)):
        if not Path(path).absolute().parent.is_dir():
            raise errors.ConfigError("its folder is not there", where=path)
    # A process that outlives the command may still write.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        code = run_recorded(command, Path(folder))
        found = read_records(Path(folder))
    sys.stdout.flush()
    if records:
        _keep(found, Path(records))
    new = () if lock is None else unheld(lock, found)
    _report(found, new, lock, form, code)
    gaps = _gaps(found)
    if output and gaps:
        note(f"{output} is left as it was")
    elif output:
        write(lock_of(found), Path(output))
        until = f"; only up to the end of the command, by exit code {code}" if code else ""
        note(f"wrote {output}{until}")
    if code:
        return code
    if gaps and (output or against):
        return errors.EXIT_UNSUPPORTED if found.troubles else errors.EXIT_CHECK
    return errors.EXIT_CHECK if new else errors.EXIT_OK


def _gaps(found: Records) -> bool:
    """Says what was not recorded; whether there was such a thing."""
    if found.obstacle:
        note(f"aot-lora: nothing was recorded: {found.obstacle}")
        return True
    for trouble in found.troubles:
        note(f"aot-lora: a process was not, or not wholly, recorded: {trouble}")
    return bool(found.troubles)


def _keep(found: Records, path: Path) -> None:
    lines = [
        {**one.fields, "outcome": one.outcome, "seconds": one.seconds, "process": one.process}
        for one in found.compiles
    ]
    try:
        path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        problem = f"the records cannot be written: {error.strerror}"
        raise errors.StoreError(problem, where=str(path)) from None


def _report(
    found: Records, new: Sequence[Unheld], lock: CaptureLock | None, form: str, code: int
) -> None:
    functions: Sequence[FunctionSummary] = ()
    told: list[New] = []
    if found.compiles:
        from aot_lora.capture.summary import by_function  # These load jax.

        functions = by_function(found.compiles)
    if lock is not None:
        told = [_told(one, lock) for one in new]
    outcomes = [one.outcome for one in found.compiles]
    totals = {
        "compiles": len(outcomes) - outcomes.count("cache hit"),
        "cache_hits": outcomes.count("cache hit"),
        "failed": outcomes.count("failed"),
        "unfinished": outcomes.count("unfinished"),
        "programs": len(lock_of(found).compiles),
        "processes": len({one.process for one in found.compiles}),
        "seconds": round(sum(one.seconds for one in found.compiles), 6),
    }
    if form == "json":
        sys.stdout.write("\n")  # The command may have left its last line open.
        emit(
            {
                **totals,
                "jax": list(found.jax),
                "exit_code": code,
                "functions": [asdict(one) for one in functions],
                "new": None if lock is None else [asdict(one) for one in told],
                "troubles": list(filter(None, [*found.troubles, found.obstacle])),
            }
        )
        return
    _say_functions(functions)
    jax = f"; jax {', '.join(found.jax)}" if found.jax else ""
    made = [_count(totals[name], noun) for name, noun in _COUNTED.items()]
    odd = "".join(f", {totals[name]} {name}" for name in ("failed", "unfinished") if totals[name])
    print(f"{made[0]} and {made[1]} of {made[2]} in {made[3]}{odd}, {totals['seconds']:.2f} s{jax}")
    if lock is not None:
        _say_new(told, found, lock)
    sys.stdout.flush()


def _told(one: Unheld, lock: CaptureLock) -> New:
    from aot_lora.capture.reasons import AGAIN, new

    told = new(one.first.fields, [line.fields for line in lock.compiles], one.first.outcome)
    if one.allowed:
        why = f"{one.count} times in one process, the lock holds {one.allowed}: {AGAIN}"
        told = replace(told, why=why)
    return told


def _say_functions(functions: Sequence[FunctionSummary]) -> None:
    if functions:
        rows = [
            (one.name, str(one.compiles), str(one.cache_hits), f"{one.seconds:.2f}")
            for one in functions[:_ROWS]
        ]
        table("", ("function", "compiles", "cache hits", "seconds"), rows)
    if rest := functions[_ROWS:]:
        count, seconds = sum(one.compiles for one in rest), sum(one.seconds for one in rest)
        print(f"and {len(rest)} more functions: {count} compiles, {seconds:.2f} s")
    # A user's own functions first: eager operations are repeated by what calls them.
    repeated = [one for one in functions if one.repeats]
    repeated.sort(key=lambda one: (one.name == one.function, -len(one.repeats)))
    for one in repeated[:_FUNCTIONS]:
        print(f"{one.name}: {one.compiles + one.cache_hits} times")
        alike = [list(group) for _, group in groupby(one.repeats, lambda it: (it.why, it.at))]
        for repeats in alike[:_REPEATS]:
            last = f" to {_nth(repeats[-1].nth)}" if len(repeats) > 1 else ""
            at = f"; {repeats[0].at}" if repeats[0].at else ""
            print(f"  {_nth(repeats[0].nth)}{last}: {repeats[0].why}{at}")
    if len(repeated) > _FUNCTIONS:
        print(f"and {len(repeated) - _FUNCTIONS} more functions several times")


def _say_new(told: Sequence[New], found: Records, lock: CaptureLock) -> None:
    if not told:
        print(f"all in the lock, which holds {_count(len(lock.compiles), 'program')}")
        return
    print(f"{_count(len(told), 'program')} not in the lock:")
    for one in told[:_NEW]:
        print("\n".join(f"  {line}" for line in one.lines()))
    if len(told) > _NEW:
        print(f"  and {len(told) - _NEW} more")
    if set(found.jax) - set(lock.jax):
        print(
            f"  the lock is of jax {', '.join(lock.jax)}, this run of {', '.join(found.jax)}:"
            " releases lower some code differently"
        )
    if len(told) == len(lock_of(found).compiles) and lock.compiles:
        print("  nothing of this run is in the lock: is it the lock of another program?")
    print("  next: undo what compiles them, or accept with `aot-lora capture -o`")


def _count(number: float, noun: str) -> str:
    ending = "" if number == 1 else "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{ending}"


def _nth(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10 * (number % 100 not in (11, 12, 13)), "th")
    return f"{number}{ending}"
