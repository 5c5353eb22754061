"""The grid of points: token buckets x lanes, and what is compiled for each. Pure.

A plan may have thousands of cells; neighbouring buckets are then put together, so that the grid
stays as large as a person reads, and their variants are listed below it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aot_lora.plan import Plan, Variant, round_up
from aot_lora.report.facts import Held, TargetFacts

MOST_ROWS = 24
MOST_COLUMNS = 16
MOST_LINES = 4000
"""Variants that are listed one by one; a plan above every limit would make a file of megabytes."""

_PAIRS = 5  # of slots x rank in a column's head; the matrix below shows all


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Variants of a point, or of several.

    Args:
      variants: how many; compiled: in the store, None where that is not known.
      bytes: of their files, each once; seconds: that they took, None where no one's are known.
      forms: of the steps there.
    """

    variants: int
    compiled: int | None
    bytes: int = 0
    seconds: float | None = None
    forms: tuple[str, ...] = ()

    @property
    def state(self) -> str:
        """``all``, ``some`` or ``none`` of it is compiled, or ``unknown``."""
        if self.compiled is None:
            return "unknown"
        if self.compiled == self.variants:
            return "all"
        return "some" if self.compiled else "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One variant; `shared` says how many variants of the plan have the same file."""

    name: str
    held: Held | None
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Token buckets, or the programs without a tokens axis; its cells are those of the columns."""

    label: str
    cells: tuple[Cell | None, ...]
    total: Cell
    lines: tuple[Line, ...] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """Lanes buckets; `pairs` are the slots x rank that come to them."""

    label: str
    pairs: tuple[str, ...]
    more: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """What is compiled for a target.

    Args:
      columns, rows: neighbours put together where there are too many.
      total: of the target; artifacts: how many files the compiled variants share.
      listed: whether `Row.lines` has them all.
    """

    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    total: Cell
    artifacts: int
    listed: bool


def grid(plan: Plan, target: TargetFacts) -> Grid:
    """The grid of a plan for a target."""
    held = target.held
    shared = Counter(one.key for one in (held or {}).values())
    by_place: dict[tuple[int, int], list[Variant]] = defaultdict(list)
    for variant in plan.variants:
        by_place[variant.tokens, variant.lanes].append(variant)
    lanes = sorted({place[1] for place in by_place})
    without, lanes = [(0,)] if 0 in lanes else [], [count for count in lanes if count]
    columns = [*without, *chunks(lanes, MOST_COLUMNS)]
    listed = len(plan.variants) <= MOST_LINES

    def row(label: str, tokens: Sequence[int]) -> Row:
        found = [[v for t in tokens for n in part for v in by_place.get((t, n), ())]
                 for part in columns]  # fmt: skip
        variants = [variant for part in found for variant in part]
        return Row(
            label=label,
            cells=tuple(
                _cell(part, held, _forms(target, tokens, column)) if part else None
                for part, column in zip(found, columns, strict=True)
            ),
            total=_cell(variants, held),
            lines=tuple(_line(v, held, shared) for v in variants) if listed else (),
        )

    rows = [row(label_of(part), part) for part in chunks(plan.tokens.buckets, MOST_ROWS)]
    if any(not variant.tokens for variant in plan.variants):
        rows.append(row("any: banks", (0,)))
    return Grid(
        columns=tuple(_column(plan, part) for part in columns),
        rows=tuple(rows),
        total=_cell(plan.variants, held),
        artifacts=len(shared),
        listed=listed,
    )


def cells_by_program(plan: Plan, target: TargetFacts) -> dict[str, Cell]:
    """What is compiled of each program."""
    by_name: dict[str, list[Variant]] = defaultdict(list)
    for variant in plan.variants:
        by_name[variant.program].append(variant)
    return {name: _cell(variants, target.held) for name, variants in by_name.items()}


def matrix(plan: Plan) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """(slots, the lanes of each rank) for each slots bucket."""
    return tuple(
        (slots, tuple(slots * round_up(rank, plan.quantum) for rank in plan.ranks))
        for slots in plan.slots
    )


def chunks(values: Sequence[int], most: int) -> list[tuple[int, ...]]:
    """The values in order, in at most `most` runs, all but the last of one length."""
    length = -(-len(values) // most) or 1
    return [tuple(values[at : at + length]) for at in range(0, len(values), length)]


def label_of(values: Sequence[int]) -> str:
    """``16``, or ``16 to 64`` for a run."""
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _column(plan: Plan, lanes: tuple[int, ...]) -> Column:
    pairs = [
        f"{slots}\N{NO-BREAK SPACE}x\N{NO-BREAK SPACE}{rank}"
        for slots, of_ranks in matrix(plan)
        for rank, count in zip(plan.ranks, of_ranks, strict=True)
        if count in lanes and count
    ]
    shown = pairs if len(pairs) <= _PAIRS else pairs[: _PAIRS - 1]
    return Column(label=label_of(lanes), pairs=tuple(shown), more=len(pairs) - len(shown))


def _forms(target: TargetFacts, tokens: Iterable[int], lanes: Sequence[int]) -> tuple[str, ...]:
    found = (name for t in tokens for n in lanes for name in target.form_names.get((t, n), ()))
    return tuple(dict.fromkeys(found))


def _cell(
    variants: Sequence[Variant],
    held: Mapping[str, Held] | None,
    forms: tuple[str, ...] = (),
) -> Cell:
    if held is None:
        return Cell(variants=len(variants), compiled=None, forms=forms)
    found = [held[variant.name] for variant in variants if variant.name in held]
    seconds = [one.seconds for one in found if one.seconds is not None]
    return Cell(
        variants=len(variants),
        compiled=len(found),
        bytes=sum({one.key: one.bytes for one in found}.values()),
        seconds=sum(seconds) if seconds else None,
        forms=forms,
    )


def _line(variant: Variant, held: Mapping[str, Held] | None, shared: Counter[str]) -> Line:
    found = (held or {}).get(variant.name)
    return Line(name=variant.name, held=found, shared=shared[found.key] if found else 0)
