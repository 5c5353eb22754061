"""What `aot-lora fit --limit-...` says: buckets of all axes fitted together under a limit."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from aot_lora.adapters.ranks import read_ranks
from aot_lora.cli.options import emit, note, size, table
from aot_lora.cli.writing import write
from aot_lora.config import Config
from aot_lora.config.limits import bill_of, limits_of, replanner, tokens_yaml
from aot_lora.errors import ConfigError, PlanError
from aot_lora.plan import usable_cores
from aot_lora.plan.budget import Bill, Limits, broken, most_variants
from aot_lora.plan.grids import Grid
from aot_lora.plan.mix import LaneCost
from aot_lora.plan.product import GridUse, Wanted, fit_grid, pow2_grid
from aot_lora.plan.simulate import Steps

_MOST_VARIANTS = 1_000_000  # of a target; far above any that compiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What the command line asks for.

    Args:
      config: of which the plan is; steps: of the trace.
      limits: from the options, None each where not given.
      budget, count, multiple, small: of the tokens axis.
      slots: buckets of slots above 0 at most; None for as many as the config has.
      ranks: a folder of adapters or a histogram; None for the config's ranks, each as likely.
      cost: of a step.
    """

    config: Config
    steps: Steps
    limits: Limits
    budget: int
    count: int | None
    multiple: int
    small: bool
    slots: int | None
    ranks: Path | None
    cost: LaneCost


def fit_under_limits(task: Task, *, head: dict[str, Any], say: str, form: str, keep: bool) -> None:
    """Fits, compares and prints; writes into the config if `keep`.

    Args:
      task: what to fit; head: the first entries of the JSON object; say: the first line for people.
      form: of the output; keep: whether to write.

    Raises:
      ConfigError: nothing fits, or as the fit raises.
    """
    config, asked = task.config, task.config.asked
    plan, targets = config.written_plan, config.targets
    replan = replanner(asked, plan)
    limits = _tighter(task.limits, limits_of(asked, seconds=True))
    most = most_variants(
        limits, targets, cores=usable_cores(), above=_MOST_VARIANTS, step_share=plan.step_share
    )
    wanted = Wanted(
        plan=plan,
        most=most,
        budget=task.budget,
        count=task.count,
        multiple=task.multiple,
        small=task.small,
        slots=sum(slot > 0 for slot in plan.slots) if task.slots is None else task.slots,
        ranks=_ranks(task.ranks),
    )
    seen = 0 if task.steps.slots is None else int(task.steps.slots.max())
    others = _others(wanted, config, seen)
    fitted = partial(fit_grid, replan=replan, cost=task.cost, edges=asked.edges, others=others)
    try:
        found = fitted(task.steps, wanted)
        # So many variants may be above a limit where more of them are steps than in the config.
        while broken(bill_of(replan(found[-1].grid), targets), limits):
            wanted = replace(wanted, most=found[-1].variants - 1)
            found = fitted(task.steps, wanted)
    except PlanError as error:
        if error.problem.startswith("no grid has"):
            raise ConfigError(
                f"nothing fits {_text(limits)}",
                expected=error.expected,
                found=f"at most {wanted.most:,} variants for each target",
                next_step=error.next_step,
            ) from None
        raise
    rows = [_row(use, bill_of(replan(use.grid), targets)) for use in found]
    grid = found[-1].grid
    if form == "json":
        chosen = rows[-1]
        emit({**head, "buckets": chosen["tokens"], "slots": chosen["slots"],
              "ranks": chosen["ranks"], "most_variants": wanted.most, "grids": rows})  # fmt: skip
    else:
        print(say)
        print(f"limits: {_text(limits)}: at most {wanted.most:,} variants for each target")
        if task.steps.slots is None:
            print("the trace has no adapters: each of the config's slots is taken as likely")
        if wanted.ranks is None:
            print("no ranks are known: each of the config's is taken as likely")
        _show(rows)
        quantum = asked.quantum_beside(plan.ranks, grid.ranks)
        print(f"lora: {{slots: {list(grid.slots)}, ranks: {list(grid.ranks)}"
              f"{'' if quantum is None else f', quantum: {quantum}'}}}")  # fmt: skip
        print(f"tokens: {tokens_yaml(asked, grid.tokens)}")
    if keep:
        _write(config, grid)


def _others(wanted: Wanted, config: Config, seen: int) -> list[tuple[str, Grid]]:
    """Powers of two, and the buckets of the config as far as they hold the steps and adapters."""
    plan = config.written_plan
    rank = 0 if wanted.ranks is None else int(wanted.ranks[0].max())
    axes = (
        ("tokens", plan.tokens.buckets[-1], wanted.budget),
        ("slots", plan.slots[-1], seen),
        ("ranks", plan.adapter_lanes.buckets[-1], rank),
    )
    short = [f"{name} end at {last}, below {most}" for name, last, most in axes if last < most]
    if short:
        note(f"warning: of {config.path} the {', the '.join(short)}: it is not compared")
    now = Grid(tokens=plan.tokens.buckets, slots=plan.slots, ranks=plan.ranks)
    pow2 = pow2_grid(wanted, last=max(seen, plan.slots[-1]))
    pow2 = replace(pow2, ranks=(*plan.ranks, rank) if plan.ranks[-1] < rank else plan.ranks)
    return [("pow2", pow2), *([] if short else [("current", now)])]


def _write(config: Config, grid: Grid) -> None:
    plan = config.written_plan
    ranks = None if grid.ranks == plan.ranks else grid.ranks
    write(
        config.path,
        tokens=grid.tokens,
        slots=None if grid.slots == plan.slots else grid.slots,
        ranks=ranks,
        quantum=None if ranks is None else config.asked.quantum_beside(plan.ranks, ranks),
    )


def _ranks(path: Path | None) -> tuple[Any, Any] | None:
    if path is None:
        return None
    found = read_ranks(path)
    return np.asarray(found.ranks, np.int64), np.asarray(found.counts, np.int64)


def _tighter(one: Limits, other: Limits) -> Limits:
    """The smaller of each limit."""
    names = [field.name for field in fields(Limits)]
    both = {name: (getattr(one, name), getattr(other, name)) for name in names}
    return Limits(
        **{
            name: min((value for value in pair if value is not None), default=None)
            for name, pair in both.items()
        }
    )


def _text(limits: Limits) -> str:
    parts = [
        *([] if limits.variants is None else [f"{limits.variants:,} variants"]),
        *([] if limits.seconds is None else [f"{limits.seconds:,g} s"]),
        *([] if limits.store_bytes is None else [size(limits.store_bytes)]),
    ]
    return ", ".join(parts)


def _row(use: GridUse, cost: Bill) -> dict[str, Any]:
    return {
        "name": use.name,
        "tokens": list(use.grid.tokens),
        "slots": list(use.grid.slots),
        "ranks": list(use.grid.ranks),
        "variants": cost.variants,
        "seconds": cost.seconds,
        "bytes": cost.store_bytes,
        "waste": round(use.waste, 4),
        "held_out": round(use.held_out, 4),
        "later": round(use.later, 4),
    }


def _show(rows: list[dict[str, Any]]) -> None:
    columns = ("grid", "tokens", "slots", "ranks", "variants", "seconds", "store", "whole trace",
               "held-out half", "later half")  # fmt: skip
    table(
        "waste of all axes (cost of the padded steps over that without padding, less one)",
        columns,
        [
            (
                row["name"],
                *(str(len(cast("list[int]", row[axis]))) for axis in ("tokens", "slots", "ranks")),
                f"{row['variants']:,}",
                f"{row['seconds']:,.0f}",
                size(row["bytes"]),
                *(f"{100 * row[key]:.1f} %" for key in ("waste", "held_out", "later")),
            )
            for row in rows
        ],
    )
