"""Everything that a report shows: the plan, its trace, its store and its memory, as values."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Literal

from aot_lora.cli import forms
from aot_lora.cli.lints import Used, lints_of, used_by
from aot_lora.cli.options import size
from aot_lora.cli.plan import shared_by
from aot_lora.config import Config
from aot_lora.config.fitted import trace_of
from aot_lora.config.limits import bill_of
from aot_lora.config.schema import FitBuckets
from aot_lora.errors import AotLoraError
from aot_lora.plan import LORA_PROGRAMS, Plan, TargetSpec, mean_waste
from aot_lora.plan.fit import histogram
from aot_lora.plan.memory import declared
from aot_lora.report import Finding, Held, MemoryFacts, PlanFacts, TargetFacts, TrafficFacts
from aot_lora.store import LocalStore
from aot_lora.store.coverage import find_manifest
from aot_lora.store.misses import widened
from aot_lora.store.warm import WarmIdentity
from aot_lora.targets.hbm import hbm_bytes
from aot_lora.warmup.memory import MemoryReport


def gather(
    config: Config,
    *,
    traffic: Path | None,
    sequences: int | None,
    measured: Sequence[MemoryReport],
    refused: Sequence[AotLoraError] = (),
) -> PlanFacts:
    """What a report of a config shows.

    Args:
      config: read whatever its plan costs.
      traffic: a trace; None for the one that the config names, if it does.
      sequences: of the simulated server, see `used_by`.
      measured: of each target, or empty.
      refused: what says that the plan is over its limits, or needs more memory than there is.

    Raises:
      ConfigError: the trace is bad.
    """
    plan = config.plan
    used = _used(config, traffic, sequences)
    findings = [_of_error("refused", error) for error in refused]
    findings += [Finding(kind="warning", text=text) for text in config.warnings]
    targets: list[TargetFacts] = []
    memory = {report.target: report for report in measured}
    for target in config.targets:
        held, problem = _held(config, target)
        shown = _target(config, target, held, memory.get(target))
        targets.append(shown)
        findings += [one for one in (problem, _declared_too_much(shown)) if one]
    findings += [
        Finding(kind="lint", text=lint.text) for lint in lints_of(config.written_plan, used)
    ]
    return PlanFacts(
        config=config.path.name,
        store=_without_home(str(config.store_root)),
        plan=plan,
        waste=mean_waste(plan.tokens),
        targets=tuple(targets),
        traffic=_traffic(used) if used else None,
        findings=tuple(findings),
        programs=_programs(plan),
        made=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        by=f"aot-lora {metadata.version('aot-lora')}",
    )


def _used(config: Config, traffic: Path | None, sequences: int | None) -> Used | None:
    plan, chunk = config.written_plan, config.prefill_chunk
    if traffic is not None:
        return used_by(plan, traffic, sequences=sequences, worth=1.0, prefill_chunk=chunk)
    fitted = config.asked.file.tokens.buckets
    if not isinstance(fitted, FitBuckets):
        return None
    trace = trace_of(fitted, config.path)
    return used_by(
        plan, trace, sequences=fitted.sequences, worth=1.0, prefill_chunk=chunk, of=fitted.of
    )


def _traffic(used: Used) -> TrafficFacts:
    tokens, counts = histogram(used.steps.tokens, used.steps.repeats)
    return TrafficFacts(
        name=used.path.name,
        requests=used.requests,
        of=used.of,
        budget=used.server.budget,
        sequences=used.server.sequences,
        tokens=tokens,
        counts=counts,
        uses=used.uses,
    )


def _target(
    config: Config,
    target: TargetSpec,
    held: Mapping[str, Held] | None,
    report: MemoryReport | None,
) -> TargetFacts:
    plan = config.plan
    device = report.device if report else hbm_bytes(target)
    at: dict[tuple[int, int], dict[str, None]] = {}
    with_forms = bool(plan.decoder) and plan.with_lanes
    for one in forms.as_json(plan, target) if with_forms else ():
        at.setdefault((one["tokens"], one["lanes"]), {})[one["form"]] = None
    return TargetFacts(
        name=str(target),
        estimate=bill_of(plan, (target,)),
        held=held,
        forms=tuple(forms.rows_of(plan, target)) if with_forms else (),
        form_names={place: tuple(names) for place, names in at.items()},
        memory=MemoryFacts(
            memory=report.memory if report else declared(plan),
            device=device,
            allowed=int(device * config.hbm_fraction),
            longest=report.length if report else None,
        ),
    )


def _held(config: Config, target: TargetSpec) -> tuple[dict[str, Held] | None, Finding | None]:
    """What the store has of the plan, and what is to be said of it.

    A file counts if it is there and of its size; `verify` reads it. Without what the target needs
    here (libtpu, a GPU) the store's identity is unknown, and so is what it holds.
    """
    store = LocalStore(config.store_root)
    try:
        # The manifest of a plan that grew by what servers missed is the written plan's.
        warm = WarmIdentity.of(widened(config), target)
        entries = {entry.variant: entry for entry in store.read_journal(warm.identity)}
    except AotLoraError as error:
        return None, _of_error("store", error, f"{target}: ")
    problem: Finding | None = None
    try:
        manifest = find_manifest(store, warm, config)
        entries |= {entry.variant: entry for entry in manifest.entries}
    except AotLoraError as error:
        problem = _of_error("store", error, f"{target}: ")
    found: dict[str, Held] = {}
    gone = 0
    for variant in config.plan.variants:
        entry = entries.get(variant.name)
        if entry is None:
            continue
        path = store.artifact_path(entry.key)
        if path.is_file() and path.stat().st_size == entry.bytes:
            found[variant.name] = Held(key=entry.key, bytes=entry.bytes, seconds=entry.seconds)
        else:
            gone += 1
    if gone:
        text = (
            f"{target}: {gone} compiled variants have lost their files; `aot-lora warmup` mends it"
        )
        problem = Finding(kind="store", text=text)
    return found, problem


def _declared_too_much(target: TargetFacts) -> Finding | None:
    memory, allowed = target.memory.memory, target.memory.allowed
    if memory.measured or not allowed or memory.total <= allowed:
        return None
    text = (
        f"{target.name}: weights, banks and cache alone take {size(memory.total)} of each device, "
        f"and {size(allowed)} are allowed"
    )
    return Finding(kind="warning", text=text)


def _of_error(kind: Literal["refused", "store"], error: AotLoraError, whose: str = "") -> Finding:
    lines = {"found": error.found, "next": error.next_step}
    if kind == "refused":
        lines = {"expected": error.expected, **lines}
    where = f"{error.where}: " if error.where else ""
    return Finding(
        kind=kind,
        text=_without_home(f"{whose}{where}{error.problem}"),
        more=tuple(_without_home(f"{name}: {line}") for name, line in lines.items() if line),
    )


def _without_home(text: str) -> str:
    """A page goes to others, who need not know whose home it was made in."""
    home = os.environ.get("HOME", "").rstrip("/")
    return text.replace(f"{home}/", "~/") if home else text


def _programs(plan: Plan) -> tuple[tuple[str, str, str], ...]:
    entries = {entry.name: entry.entry for entry in plan.user}
    return tuple(
        (name, shared_by(plan, name), "XLA" if name in LORA_PROGRAMS else entries[name])
        for name in dict.fromkeys(variant.program for variant in plan.variants)
    )
