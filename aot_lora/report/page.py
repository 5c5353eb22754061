"""The page: what is shown where is in `templates/`; everything in it is escaped by jinja2."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from dataclasses import dataclass
from importlib import resources

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from aot_lora.report.budget import Budget, budget
from aot_lora.report.facts import PlanFacts, TargetFacts
from aot_lora.report.grid import Cell, Grid, cells_by_program, grid, matrix
from aot_lora.report.histogram import percent, picture

_WIDE, _NARROW = 1040, 360  # pixels: a desk and a phone; the style shows the one that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A target as the templates take it."""

    facts: TargetFacts
    grid: Grid
    programs: dict[str, Cell]
    budget: Budget


def render(facts: PlanFacts) -> str:
    """The report of a plan, as one HTML file that loads nothing."""
    env = Environment(
        loader=PackageLoader("aot_lora.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    env.filters |= {"number": _number, "seconds": _seconds, "percent": percent, "size": _size}
    style = resources.files("aot_lora.report").joinpath("templates/style.css").read_text("utf-8")
    plan, traffic = facts.plan, facts.traffic
    targets = [
        _Target(
            facts=target,
            grid=grid(plan, target),
            programs=cells_by_program(plan, target),
            budget=budget(target.memory),
        )
        for target in facts.targets
    ]
    held = [one.grid.total.compiled for one in targets]
    return env.get_template("page.html").render(
        facts=facts,
        plan=plan,
        traffic=traffic,
        targets=targets,
        pictures=[picture(traffic, width=width) for width in (_WIDE, _NARROW)] if traffic else [],
        executables=Counter(variant.tokens for variant in plan.variants),
        pairs=len({(v.tokens, v.lanes) for v in plan.variants if v.tokens}),
        matrix=matrix(plan),
        compiled=None if None in held else sum(count or 0 for count in held),
        style=Markup(style),  # a file of this package
        # The policy lets this one style through and nothing else: no script, font, image or frame.
        style_hash=base64.b64encode(hashlib.sha256(style.encode()).digest()).decode(),
    )


def _number(value: float) -> str:
    return f"{value:,}"


def _seconds(value: float) -> str:
    """``0.42 s``, ``6.7 s``, ``134 s``, ``21 min``, ``3.4 h``."""
    if value < 600:
        return f"{value:.{2 if value < 1 else 1 if value < 100 else 0}f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def _size(count: int) -> str:
    """``5.0 KiB``."""
    value, units = float(abs(count)), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    sign = "-" if count < 0 else ""
    return f"{sign}{value:.0f} {units[0]}" if units[0] == "B" else f"{sign}{value:.1f} {units[0]}"
