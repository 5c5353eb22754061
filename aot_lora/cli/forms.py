"""How `aot-lora plan` shows which forms the steps use."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any

from aot_lora.cli.options import table
from aot_lora.plan import Plan, TargetSpec

if TYPE_CHECKING:
    from aot_lora.decoder.choices import SiteChoice

COLUMNS = ("modules", "tokens", "lanes", "form", "why")


def show(plan: Plan, target: TargetSpec) -> None:
    """Prints the forms of a target."""
    table(f"forms of the steps, {target}", COLUMNS, rows_of(plan, target))


def rows_of(plan: Plan, target: TargetSpec) -> list[tuple[str, ...]]:
    """The forms of a target, neighbouring token buckets of one form in a row, by `COLUMNS`."""
    rows: list[tuple[str, ...]] = []
    for found in _grouped(plan, target):
        first, last = found[0].sizes.tokens, found[-1].sizes.tokens
        rows.append(
            (
                "+".join(found[0].modules),
                str(first) if first == last else f"{first} to {last}",
                str(found[0].sizes.lanes),
                _name(found[0]),
                found[0].choice.reason,
            )
        )
    return rows


def as_json(plan: Plan, target: TargetSpec) -> list[dict[str, Any]]:
    """The form of every site at every point."""
    from aot_lora.decoder.choices import site_choices

    return [
        {
            "modules": list(one.modules),
            "tokens": one.sizes.tokens,
            "lanes": one.sizes.lanes,
            "form": one.choice.form.name,
            "tuning": dict(one.choice.tuning),
            "reason": one.choice.reason,
        }
        for one in site_choices(plan, target)
    ]


def _grouped(plan: Plan, target: TargetSpec) -> Iterator[list[SiteChoice]]:
    from aot_lora.decoder.choices import site_choices

    def alike(one: SiteChoice) -> Any:
        return one.modules, one.sizes.lanes, _name(one), one.choice.reason

    ordered = sorted(site_choices(plan, target), key=lambda one: one.sizes.lanes)
    for _, found in groupby(sorted(ordered, key=lambda one: one.modules), key=alike):
        yield list(found)


def _name(one: SiteChoice) -> str:
    tuning = ", ".join(f"{name}={value}" for name, value in one.choice.tuning.items())
    return f"{one.choice.form.name} ({tuning})" if tuning else one.choice.form.name
