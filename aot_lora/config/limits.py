"""Refuses a plan that costs more than its config allows, with the cheapest change that fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from aot_lora.config.asked import Asked
from aot_lora.errors import PlanError
from aot_lora.plan import Plan, TargetSpec, usable_cores
from aot_lora.plan.budget import Bill, Limits, bill, broken, most_variants

if TYPE_CHECKING:  # numpy, for those whose plan is refused
    from aot_lora.plan.grids import Choice, Grid, Replan
    from aot_lora.plan.mix import Mix

_PROBLEMS = {
    "variants": "the plan has too many variants",
    "seconds": "the plan takes too long to warm up",
    "store_bytes": "the plan needs too many bytes in the store",
}


def limits_of(asked: Asked, *, seconds: bool) -> Limits:
    """What `limits:` allow, in `seconds` too if asked: those depend on the host."""
    section = asked.file.limits
    return Limits(
        variants=section.variants,
        seconds=section.seconds if seconds else None,
        store_bytes=section.store_bytes,
    )


def hold_limits(
    asked: Asked,
    plan: Plan,
    targets: Sequence[TargetSpec],
    *,
    seconds: bool = False,
    mix: Mix | None = None,
) -> None:
    """Refuses a plan that is larger than its config allows, before any compile.

    Args:
      asked: the config's file.
      plan: what it asks for; targets: what it is compiled for.
      seconds: whether the time of a warmup counts: on a host that compiles, not on one that serves.
      mix: the steps of a recorded trace, by which changes are judged; None for those of the grid.

    Raises:
      PlanError: no variants, or more of them, of seconds or of bytes than the limits allow.
    """
    count = len(plan.variants)
    if not count:
        raise PlanError(
            "the plan has no variants: without slots above 0 no LoRA program runs",
            where=asked.place("limits", "variants"),
            next_step="list slots above 0, or a program of your own",
        )
    limits = limits_of(asked, seconds=seconds)
    found = bill_of(plan, targets)
    name = broken(found, limits)
    if name is None:
        return
    most = most_variants(
        limits, targets, cores=usable_cores(), above=count, step_share=plan.step_share
    )
    raise PlanError(
        _PROBLEMS[name],
        where=asked.place("limits", name),
        expected=f"at most {_amount(name, getattr(limits, name))}",
        found=str(found),
        next_step=_advice(asked, plan, targets, limits, most, mix),
    )


def bill_of(plan: Plan, targets: Sequence[TargetSpec]) -> Bill:
    """What a plan costs on this host."""
    count = len(plan.variants)
    return bill(count, targets, cores=usable_cores(), step_share=plan.step_share)


def _amount(name: str, value: float) -> str:
    if name == "store_bytes":
        return f"{value / 2**20:,.0f} MiB"
    return f"{value:,} variants" if name == "variants" else f"{value:,g} s"


def _advice(
    asked: Asked,
    plan: Plan,
    targets: Sequence[TargetSpec],
    limits: Limits,
    most: int,
    mix: Mix | None,
) -> str:
    from aot_lora.plan.changes import changes, smallest
    from aot_lora.plan.chips import work
    from aot_lora.plan.grids import Grid, Search
    from aot_lora.plan.mix import mix_of_points

    replan = replanner(asked, plan)

    cost = work(plan)
    grid = Grid(tokens=plan.tokens.buckets, slots=plan.slots, ranks=plan.ranks)
    search = Search(
        mix_of_points(plan, cost) if mix is None else mix,
        replan,
        cost,
        quantum=plan.quantum,
        edges=asked.edges,
    )
    basis = "if each point is as frequent" if mix is None else "for the steps of the trace"
    now = search.cost_of(grid)
    while True:
        found = [
            (choice, bill_of(replan(choice.grid), targets))
            for choice in changes(grid, search, most=most)
        ]
        # So many variants may be above a limit where more of them are steps than before.
        above = [choice.variants for choice, cost in found if broken(cost, limits)]
        if not above:
            break
        most = min(above) - 1
    lines = [
        f"{' and '.join(_lines(asked, grid, choice))}: {cost}; {_more(choice, now)} work {basis}"
        for choice, cost in found
    ]
    if not lines:
        least = smallest(grid)
        bound = bill_of(replan(least), targets)
        with_it = " and ".join(_keys(asked, grid, least))
        return (
            f"nothing fits: {f'with {with_it} it is still' if with_it else 'it is'} {bound}; allow "
            f"that by `{_limits_line(limits, bound)}`, or use fewer modules, programs or targets"
        )
    needed = _limits_line(limits, bill_of(plan, targets))
    return "\n    or ".join([f"write {lines[0]}", *lines[1:], f"`{needed}` for all of it"])


def replanner(asked: Asked, plan: Plan) -> Replan:
    """Plans a config again with another grid.

    The quantum stays that of `plan`: with a coarser one the banks would hold fewer adapters.
    """

    def replan(grid: Grid) -> Plan:
        return asked.plan(
            tokens=grid.tokens, slots=grid.slots, ranks=grid.ranks, quantum=plan.quantum
        )

    return replan


def _more(choice: Choice, now: float) -> str:
    share = choice.cost / now - 1 if now else 0.0
    return f"{100 * share:.1f} % more" if share >= 0.0005 else "no more"


def _limits_line(limits: Limits, needed: Bill) -> str:
    """The limits that allow so much, of those that do not."""
    keys: list[str] = []
    if limits.variants is not None and needed.variants > limits.variants:
        keys.append(f"variants: {needed.variants}")
    if limits.seconds is not None and needed.seconds > limits.seconds:
        keys.append(f"seconds: {-int(-needed.seconds // 1)}")
    if limits.store_bytes is not None and needed.store_bytes > limits.store_bytes:
        keys.append(f"store_bytes: {-(-needed.store_bytes // 2**20)}MiB")
    return f"limits: {{{', '.join(keys)}}}"


def _lines(asked: Asked, before: Grid, choice: Choice) -> list[str]:
    document = asked.document
    places = {
        "tokens": ("tokens",),
        "slots": ("lora", "slots"),
        "ranks": ("lora", "ranks"),
        "quantum": ("lora", "ranks"),
    }
    return [
        f"{key} at line {document.mark(places[key[1:].partition(':')[0]])[0]}"
        for key in _keys(asked, before, choice.grid)
    ]


def _keys(asked: Asked, before: Grid, after: Grid) -> list[str]:
    """The YAML of each axis that differs."""
    found: list[str] = []
    if after.tokens != before.tokens:
        found.append(f"`tokens: {tokens_yaml(asked, after.tokens)}`")
    if after.slots != before.slots:
        found.append(f"`slots: {list(after.slots)}`")
    if after.ranks != before.ranks:
        quantum = asked.quantum_beside(before.ranks, after.ranks)
        found.append(f"`ranks: {list(after.ranks)}`")
        found += [] if quantum is None else [f"`quantum: {quantum}`"]
    return found


def tokens_yaml(asked: Asked, buckets: tuple[int, ...]) -> str:
    """The value of `tokens:` with these buckets; a long list of equal steps as a step."""
    section = asked.file.tokens
    step, budget = buckets[0], buckets[-1]
    stepped = len(buckets) > 16 and buckets == (*range(step, budget, step), budget)
    values = f"{{step: {step}}}" if stepped else str(list(buckets))
    chunk = "" if section.prefill_chunk is None else f", prefill_chunk: {section.prefill_chunk}"
    return f"{{budget: {budget}, buckets: {values}{chunk}}}"
