"""`aot-lora bench`: every form of adapters at points of a plan, on this host's device."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from aot_lora.cli.options import common, emit, note, read_config
from aot_lora.config import presets
from aot_lora.config.tables import Table, read_table
from aot_lora.errors import ConfigError, StoreError

_SIZE = click.IntRange(min=1)


@click.command()
@common
@click.option("--tune", is_flag=True, help="Write the table that plans choose forms from.")
@click.option("--tokens", type=_SIZE, multiple=True, help="A token bucket; all unless given.")
@click.option("--lanes", type=_SIZE, multiple=True, help="A lane bucket; all unless given.")
@click.option("--form", "forms", multiple=True, help="A form; all unless given.")
@click.option("-o", "--output", metavar="FILE", help="The table; the hardware's own unless given.")
def command(
    config: str,
    store: str | None,
    form: str,
    debug: bool,
    tune: bool,
    tokens: tuple[int, ...],
    lanes: tuple[int, ...],
    forms: tuple[str, ...],
    output: str | None,
) -> None:
    """Time every form of adapters at points of CONFIG, checked before it is timed.

    With --tune the table of the hardware takes them up; plans of that hardware choose from it.
    """
    del debug
    if output and not tune:
        raise click.UsageError("-o goes with --tune")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    loaded = read_config(config, store)
    target = loaded.targets[0]
    hardware = target.topology.partition(":")[0]
    if tune and not hardware:
        raise ConfigError(
            "a table is of some hardware, and this target names none",
            where=f"{loaded.path}: target",
            expected="a topology, such as h200 or v6e:1x1",
        )
    path = Path(output or presets.presets_root() / "devices" / f"{hardware}.kernels.json")

    from aot_lora.kernels.forms import FORMS
    from aot_lora.targets.devices import host_devices
    from aot_lora.tuning.table import measured, merged, source_of

    for name in forms:
        if name not in FORMS:
            raise click.UsageError(f"no form `{name}`; there are {', '.join(FORMS)}")
    source = source_of(host_devices(target)[0], config)
    table = Table(hardware=hardware, source=source, rows=())
    if tune and path.is_file():
        table = read_table(path).model_copy(update={"source": source})
    rows = measured(
        loaded.plan, platform=target.platform, tokens=tokens, lanes=lanes, forms=forms, say=note
    )
    count = 0
    for row in rows:
        count += 1
        table = merged(table, row)
        if tune:  # After each: a run that is cut short keeps what it has.
            _write(path, table)
    if form == "json":
        emit({"rows": count, "path": str(path) if tune else None})
    elif tune:
        print(f"{count} rows in {path}")
    else:
        sys.stdout.write(table.text())
    sys.stdout.flush()


def _write(path: Path, table: Table) -> None:
    try:
        path.write_text(table.text(), encoding="utf-8")
    except OSError as error:
        raise StoreError(
            f"the table cannot be written: {error.strerror}", where=str(path)
        ) from None
