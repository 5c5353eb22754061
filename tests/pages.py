"""Reads the pages of `aot-lora report` as a strict parser of HTML does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import html5lib

from aot_lora.cli.gather import gather
from aot_lora.cli.main import run
from aot_lora.config.load import read
from aot_lora.errors import EXIT_OK
from aot_lora.report import PlanFacts

TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"{at},{20 + 7 * at % 41},{5 + at % 9}\n" for at in range(40)
)
"""Forty requests a second apart, prompts of 20 to 60 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table: its caption, its column heads, and the text of each row's cells."""

    caption: str
    heads: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    values: tuple[tuple[float, ...], ...]


def parsed(page: str) -> Element:
    """The page's tree; any error of syntax, a second id or a stray end tag is raised."""
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    ids = [element.get("id") for element in elements(tree) if element.get("id")]
    assert len(ids) == len(set(ids))
    return tree


def elements(tree: Element, name: str | None = None) -> list[Element]:
    """Elements by name, whatever their namespace; comments are none."""
    found = (e for e in tree.iter() if isinstance(e.tag, str))
    return [e for e in found if name is None or e.tag.rpartition("}")[2] == name]


def text(element: Element) -> str:
    """What it says, spaces folded."""
    return " ".join("".join(element.itertext()).split())


def values(element: Element) -> tuple[float, ...]:
    """Its `<data>`, in order."""
    return tuple(float(e.get("value", "")) for e in elements(element, "data") if e.get("value"))


def facts(tree: Element) -> dict[str, float | None]:
    """The key figures at the top, by name."""
    (top,) = (dl for dl in elements(tree, "dl") if dl.get("class") == "facts")
    return {
        text(elements(fact, "dt")[0]): next(iter(values(fact)), None)
        for fact in elements(top, "div")
    }


def tables(tree: Element) -> Iterator[Table]:
    """Every table of the page."""
    for table in elements(tree, "table"):
        (caption,) = elements(table, "caption")
        (head,) = elements(table, "thead")
        rows = [row for row in elements(table, "tr") if row not in elements(head, "tr")]
        yield Table(
            caption=text(caption),
            heads=tuple(text(cell) for cell in elements(head, "th")),
            rows=tuple(tuple(text(cell) for cell in row) for row in rows),
            values=tuple(values(row) for row in rows),
        )


def reported(config: Path | str, folder: Path, *options: object, code: int = EXIT_OK) -> Any:
    """The tree of the page that the command writes."""
    path = folder / "plan.html"
    assert run(["report", str(config), "-o", str(path), *map(str, options)]) == code
    return parsed(path.read_text("utf-8"))


def table_of(tree: Any, heads: str) -> Table:
    """The table whose first two column heads these are."""
    (found,) = (table for table in tables(tree) if table.heads[0:2] == tuple(heads.split("|")))
    return found


def facts_of(config: Path) -> PlanFacts:
    """What a report of a config shows, without a trace."""
    return gather(read(config), traffic=None, sequences=None, measured=())
