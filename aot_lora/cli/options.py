"""Options and output that all verbs share."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import click

from aot_lora.config import Config, load_config
from aot_lora.config.load import read
from aot_lora.config.schema import with_unit
from aot_lora.errors import ConfigError

FORMATS = ("human", "json")
_NUMBER = re.compile(r"[\d.,]+( \S+)?")  # 12; 3.4 MiB; 25 %


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """CONFIG, --store, --format and --debug."""
    decorators = (
        click.argument("config"),
        click.option("--store", metavar="DIR", help="The store's folder."),
        click.option("--format", "form", type=click.Choice(FORMATS), default="human"),
        click.option("--debug", is_flag=True, help="Show tracebacks of errors."),
    )
    for decorate in reversed(decorators):
        function = decorate(function)
    return function


def byte_count(text: str) -> int:
    """Bytes of an option: ``64MiB``, or an integer.

    Raises:
      ConfigError: it is none.
    """
    try:
        found = int(text) if text.isdecimal() else with_unit(text)
    except ValueError as error:
        raise ConfigError(f"bad size: {error}", found=repr(text)[:60]) from None
    if not found:
        raise ConfigError("a size of nothing", expected="at least 1")
    return int(found)


backend = click.option(
    "--backend",
    type=click.Choice(("jax", "torch_xla")),
    default="jax",
    help="What serves the plan; torch_xla needs its own versions, see the README.",
)


memory_option = click.option(
    "--memory", is_flag=True, help="Compile the largest steps for the memory they need."
)
sequences_option = click.option(
    "--sequences",
    type=int,
    metavar="COUNT",
    help="Of --traffic: requests at once. [default: kv_cache's, or 256]",
)


def read_config(name: str, store: str | None, *, limited: bool = True) -> Config:
    """Loads a config and says its warnings on stderr; unless `limited`, whatever its plan costs."""
    config = (load_config if limited else read)(name, store=store)
    for warning in config.warnings:
        note(f"warning: {warning}")
    return config


def note(text: str) -> None:
    """Says something on stderr."""
    sys.stderr.write(text + "\n")


def emit(value: dict[str, Any]) -> None:
    """Prints one JSON object on one line on stdout."""
    sys.stdout.write(json.dumps(value) + "\n")


def table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Prints a table on stdout; numbers to the right."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    grid = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(_NUMBER.fullmatch(row[index]) for row in rows)
        grid.add_column(column, justify="right" if numeric else "left", no_wrap=index == 0)
    for row in rows:
        grid.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(grid)


def size(count: int) -> str:
    """Bytes for people: ``3.4 MiB``."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
