"""From a plan to the table of its kernels: every form at every point, on the device at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax

from aot_lora.config.tables import Row, Table
from aot_lora.decoder.lora import LAYER_SITES
from aot_lora.kernels.forms import FORMS
from aot_lora.plan import Module, Plan
from aot_lora.tuning.measure import Point, Timed, Tuned, measure

Say = Callable[[str], None]


def measured(
    plan: Plan,
    *,
    platform: str,
    tokens: tuple[int, ...] = (),
    lanes: tuple[int, ...] = (),
    forms: tuple[str, ...] = (),
    say: Say,
) -> Iterator[Row]:
    """Measures every form and each of its tunings at points of a plan, one after the other.

    Args:
      plan: its sites, and unless given its buckets.
      platform: of the device.
      tokens, lanes: buckets to measure at.
      forms: to measure; all unless given.
      say: told of each point.
    """
    wanted = candidates(forms or tuple(FORMS))
    for point in points(plan, tokens or plan.tokens.buckets, lanes or plan.lanes.buckets):
        timed = measure(point, wanted, platform=platform)
        say(text_of(point, timed))
        yield row_of(point, timed)


def source_of(device: Any, config: str) -> str:
    """Where figures come from, in words."""
    return f"aot-lora bench {config} --tune, on {device.device_kind} with jax {jax.__version__}"


def merged(table: Table, row: Row) -> Table:
    """A table with a row, in place of what it had at that point."""
    rows = {(one.tokens, one.lanes, one.d, one.o): one for one in (*table.rows, row)}
    return table.model_copy(update={"rows": tuple(rows[key] for key in sorted(rows))})


def candidates(names: Sequence[str]) -> dict[str, Tuned]:
    """Forms by name, and each of their further tunings by name and number."""
    found: dict[str, Tuned] = {}
    for name in names:
        for number, tuning in enumerate(FORMS[name].tunings or ({},)):
            found[f"{name}#{number}" if number else name] = FORMS[name], tuning
    return found


def points(plan: Plan, tokens: tuple[int, ...], lanes: tuple[int, ...]) -> Iterator[Point]:
    """A point for each site's sizes on one device and each bucket, few rows first."""
    sites: dict[tuple[int, tuple[int, ...]], None] = {}
    for site in sites_of(plan):
        widths = [plan.widths(module) for module in site]
        sites[widths[0][0], tuple(o for _, o in widths)] = None
    base = Point(tokens=1, d=1, o=(), ranks=(), block=plan.quantum, dtype=plan.dtype)
    for rows in tokens:
        for count in lanes:
            for d, o in sites:
                ranks = ranks_of(plan, count)
                yield replace(base, tokens=rows, d=d, o=o, ranks=ranks)


def sites_of(plan: Plan) -> list[tuple[Module, ...]]:
    """Modules of the layers that read the same rows: a decoder's, else each alone."""
    by = {module.name: module for module in plan.modules if module.layers == plan.layers}
    named = LAYER_SITES if plan.decoder else tuple((name,) for name in by)
    found = [tuple(by[name] for name in site if name in by) for site in named]
    return [site for site in found if site]


def ranks_of(plan: Plan, lanes: int) -> tuple[int, ...]:
    """As many equal adapters as the plan has slots for, of so many lanes in all."""
    for slots in sorted(plan.slots, reverse=True):
        for rank in plan.ranks:
            if slots and slots * plan.adapter_lanes.bucket(rank) == lanes:
                return (rank,) * slots
    return (lanes,)


def row_of(point: Point, timed: Timed) -> Row:
    """The best tuning of each form at a point."""
    best: dict[str, tuple[float, dict[str, int]]] = {}
    for label, us in timed.forms.items():
        name = label.partition("#")[0]
        if name not in best or us < best[name][0]:
            best[name] = us, dict(candidates([name])[label][1])
    return Row(
        tokens=point.tokens,
        lanes=point.sizes.lanes,
        d=point.d,
        o=sum(point.o),
        most=point.sizes.most,
        us={name: round(us - timed.link, 2) for name, (us, _) in best.items()},
        tuning={name: tuning for name, (_, tuning) in best.items() if tuning},
    )


def text_of(point: Point, timed: Timed) -> str:
    """What was found at a point, in a line."""
    base = timed.base - timed.link
    parts = [f"{name} {(us - timed.base) / base:+.1%}" for name, us in timed.forms.items()]
    refused = {name.partition("#")[0]: why for name, why in timed.refused.items()}
    parts += [f"not {name}: {why[:80]}" for name, why in refused.items()]
    where = f"t{point.tokens} l{point.sizes.lanes} d{point.d} o{'+'.join(map(str, point.o))}"
    return f"{where}: base {base:.1f} us; {'; '.join(parts)}"
