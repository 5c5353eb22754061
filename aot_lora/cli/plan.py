"""`aot-lora plan`: a dry run."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import click

from aot_lora.cli import forms
from aot_lora.cli.lints import lint_json, lints_of, show_used, used_by, uses_json
from aot_lora.cli.memory import as_json, show
from aot_lora.cli.options import (
    common,
    emit,
    memory_option,
    note,
    read_config,
    sequences_option,
    size,
    table,
)
from aot_lora.config import Config
from aot_lora.config.limits import bill_of, hold_limits
from aot_lora.errors import ConfigError
from aot_lora.plan import Plan, mean_waste
from aot_lora.warmup.fewer import refuse_what_cannot_fit, refuse_what_does_not_fit
from aot_lora.warmup.memory import memory_report


@click.command()
@common
@click.option("--variants", "list_variants", is_flag=True, help="List every variant's name.")
@memory_option
@click.option("--traffic", type=click.Path(path_type=Path), metavar="FILE",
              help="Say which token buckets a recorded trace uses, as `fit` reads it.")  # fmt: skip
@sequences_option
@click.option("--worth", type=float, metavar="POINTS",
              help="Of --traffic: waste that a bucket has to save. [default: 1]")  # fmt: skip
def command(
    config: str,
    store: str | None,
    form: str,
    debug: bool,
    list_variants: bool,
    memory: bool,
    traffic: Path | None,
    sequences: int | None,
    worth: float | None,
) -> None:
    """What would be compiled for CONFIG: variants, waste, seconds, bytes. Stores nothing."""
    del debug
    if traffic is None and (sequences is not None or worth is not None):
        option = "--worth" if sequences is None else "--sequences"
        raise ConfigError(f"{option} needs a trace", next_step="name it with --traffic")
    loaded = read_config(config, store, limited=False)
    plan = loaded.plan
    used = None
    if traffic is not None:
        used = used_by(
            loaded.written_plan,
            traffic,
            sequences=sequences,
            worth=1.0 if worth is None else worth,
            prefill_chunk=loaded.prefill_chunk,
        )
    hold_limits(
        loaded.asked,
        plan,
        loaded.targets,
        seconds=True,
        mix=used.mix(loaded.written_plan) if used else None,
    )
    lints = lints_of(loaded.written_plan, used)
    cost = bill_of(plan, loaded.targets)
    waste = mean_waste(plan.tokens)
    reports = [memory_report(loaded, target, say=note) for target in loaded.targets if memory]
    if form == "json":
        value: dict[str, Any] = {
            "points": plan.points * cost.targets,
            "variants": cost.variants,
            "seconds": cost.seconds,
            "bytes": cost.store_bytes,
            "waste": [{"bucket_tokens": b, "waste": round(w, 4)} for b, w in waste],
        }
        if plan.decoder and plan.with_lanes:
            value["forms"] = {str(t): forms.as_json(plan, t) for t in loaded.targets}
        if used:
            value["traffic"] = uses_json(used)
        if used or lints:
            value["lints"] = [lint_json(lint) for lint in lints]
        if memory:
            value["memory"] = {str(report.target): as_json(report) for report in reports}
        emit(value)
    else:
        _show(loaded, plan, waste)
        print(
            f"estimate of a cold warmup: {cost.seconds:.0f} s on {cost.cores} cores, "
            f"{size(cost.store_bytes)} in {loaded.store_root}"
        )
        if used:
            show_used(used)
        for lint in lints:
            print(f"lint: {lint.text}")
        if plan.decoder and plan.with_lanes:
            for target in loaded.targets:
                forms.show(plan, target)
        for report in reports:
            show(loaded, report)
        if list_variants:
            sys.stdout.writelines(variant.name + "\n" for variant in plan.variants)
    sys.stdout.flush()
    for target in () if memory else loaded.targets:
        refuse_what_cannot_fit(loaded, target)
    for report in reports:
        refuse_what_does_not_fit(loaded, report, say=note)


def _show(config: Config, plan: Plan, waste: tuple[tuple[int, float], ...]) -> None:
    print(f"{config.path} for {', '.join(map(str, config.targets))}")
    print(
        f"{plan.points} points: {len(plan.tokens.buckets)} tokens x {len(plan.slots)} slots "
        f"x {len(plan.ranks)} ranks, over {len(plan.modules)} modules; "
        f"they fold into {len(plan.variants)} executables"
    )
    counts = Counter(variant.program for variant in plan.variants)
    rows = [(name, str(count), shared_by(plan, name)) for name, count in counts.items()]
    table("programs", ("program", "variants", "one for each"), rows)
    if plan.with_lora:
        rows = [(str(lanes), _folds(plan, lanes)) for lanes in plan.lanes.buckets]
        table("lanes", ("lanes", "slots x rank that share them"), rows)
    rows = [(str(bucket), f"{100 * share:.1f} %") for bucket, share in waste]
    table("token buckets", ("tokens", "mean padding, if each length in it is equally likely"), rows)
    if 0 in plan.slots and plan.with_lora:
        print("slots 0: no LoRA program runs; the base output is returned as it is")
    if plan.with_lora:
        print(
            f"banks: {plan.bank_blocks - 1} blocks of {plan.quantum} lanes for "
            f"{plan.max_adapters} adapters, {size(plan.bank_bytes)} on the device"
        )


def shared_by(plan: Plan, program: str) -> str:
    """Of what a program has one variant each."""
    d_sizes = len({module.d for module in plan.modules})
    o_sizes = len({module.o for module in plan.modules})
    shapes = len({(module.d, module.o) for module in plan.modules})
    tokens, lanes = len(plan.tokens.buckets), len(plan.lanes.buckets)
    adapters = len(plan.adapter_lanes.buckets)
    widths = {"lora_shrink": f"{d_sizes} D", "lora_expand": f"{o_sizes} O"}
    base = program.removesuffix("_single")
    if base in widths:
        count = adapters if program.endswith("_single") else lanes
        return f"{tokens} tokens x {count} lanes x {widths[base]}"
    if program.startswith("bank_"):
        return f"{adapters} lanes x {shapes} (D, O)"
    most = next(entry.max_tokens for entry in plan.user if entry.name == program)
    if most is not None:
        tokens = plan.tokens.buckets.index(most) + 1
    return f"{tokens} tokens x lanes, 0 included where slots are"


def _folds(plan: Plan, lanes: int) -> str:
    pairs = [(s, r) for s in plan.slots for r in plan.ranks if _lanes(plan, s, r) == lanes]
    return ", ".join(f"{slots} x {rank}" for slots, rank in pairs)


def _lanes(plan: Plan, slots: int, rank: int) -> int:
    return slots * plan.adapter_lanes.bucket(rank)
