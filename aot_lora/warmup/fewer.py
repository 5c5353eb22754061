"""What is refused because a device has too little memory, and the cheapest changes that fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from aot_lora.config import Config
from aot_lora.errors import PlanError
from aot_lora.plan import TargetSpec
from aot_lora.plan.memory import Memory, add_up, cache_bytes, largest_variants
from aot_lora.targets.hbm import hbm_bytes
from aot_lora.warmup import memory as measuring
from aot_lora.warmup.memory import STEP, Knob, MemoryReport, largest, memory_report

_GIB = 2**30


def refuse_what_does_not_fit(
    config: Config, report: MemoryReport, *, say: Callable[[str], None] = lambda _: None
) -> None:
    """Raises where a plan needs more than the config's share of a device.

    Looks for fewer resident lanes that fit, by compiling, before it does.

    Args:
      config: of the plan; report: of its memory.
      say: told what is being compiled.

    Raises:
      PlanError: with the figures, and the changes that fit.
    """
    if report.fits:
        return
    memory = report.memory
    found = memory.refused or f"{memory.total / _GIB:.2f} GiB, {memory.total / report.device:.0%}"
    share = f"{config.hbm_fraction:.0%} of {report.device / _GIB:.2f} GiB"
    changes = [*_shorter(config, report), *_fewer_adapters(config, report, say)]
    changes += _larger_share(report)
    changes = changes or _both(config, report, say)
    raise PlanError(
        "the plan needs more memory than a device may give it",
        where=f"{config.path}: {report.target}",
        expected=f"at most {report.allowed / _GIB:.2f} GiB on each device, "
        f"limits.hbm_fraction {config.hbm_fraction:g}: {share}",
        found=found,
        next_step="\n    or ".join(changes) or _nothing(config, report),
    )


def refuse_what_cannot_fit(config: Config, target: TargetSpec) -> None:
    """Raises where the banks and the cache alone are too much; nothing is compiled for that.

    Raises:
      PlanError: with bounds for each; what fits beside weights and steps only `--memory` can say.
    """
    plan, device = config.plan, hbm_bytes(target)
    allowed = int(device * config.hbm_fraction)
    cache = cache_bytes(plan, length=plan.cache.length) if plan.cache else 0
    if not device or plan.bank_bytes + cache <= allowed:
        return
    bounds: list[str] = []
    if plan.bank_bytes:
        blocks = (allowed - cache) // (plan.bank_bytes // plan.bank_blocks)
        if blocks > plan.most_blocks:
            bounds.append(f"lora.resident_lanes of at most {(blocks - 1) * plan.quantum}")
    if plan.cache:
        length = (allowed - plan.bank_bytes) // cache_bytes(plan, length=1)
        bounds += [f"a kv_cache.length of at most {length}"] if length > 0 else []
    wanted = " or ".join(bounds) or "fewer resident lanes and a shorter cache"
    raise PlanError(
        "the banks and the cache alone need more memory than a device may give the plan",
        where=f"{config.path}: {target}",
        expected=f"at most {allowed / _GIB:.2f} GiB on each device, "
        f"limits.hbm_fraction {config.hbm_fraction:g}",
        found=f"banks of {plan.bank_bytes / _GIB:.2f} GiB and a cache of {cache / _GIB:.2f} GiB",
        next_step=f"ask for {wanted}; `plan --memory` finds what fits beside the rest",
    )


def _shorter(config: Config, report: MemoryReport) -> list[str]:
    cache, best = config.plan.cache, report.at_length
    if cache is None or best is None:
        return []
    room = report.allowed - best.total + best.cache
    sequences = room // cache_bytes(
        replace(config.plan, cache=replace(cache, sequences=1)), length=cache.length
    )
    text = f"`kv_cache: {{sequences: {cache.sequences}, length: {report.length}}}` fits"
    if 0 < sequences < cache.sequences:
        fewer = f"{{sequences: {sequences}, length: {cache.length}}}"
        text += f"; so should `kv_cache: {fewer}`"
    return [text]


def _fewer_adapters(config: Config, report: MemoryReport, say: Callable[[str], None]) -> list[str]:
    """The most resident lanes that fit, if the largest adapter still does."""
    plan = config.plan
    least = 1 + plan.most_blocks  # the block of zeros, and one adapter
    banks = report.memory.banks  # a program of the user's own may take them, without any of ours
    if not banks or plan.bank_blocks <= least:
        return []

    def measure_at(blocks: int) -> Memory:
        say(f"{report.target}: trying lora.resident_lanes {(blocks - 1) * plan.quantum}")
        fewer = replace(plan, bank_blocks=blocks)
        changed = replace(config, plan=fewer)
        return add_up(fewer, measuring.measure_all(changed, report.target, largest_variants(fewer)))

    knob = Knob(
        growth=banks // plan.bank_blocks,
        least=least,
        most=plan.bank_blocks,
        held=lambda memory: memory.banks,
        measure=measure_at,
    )
    held = report.memory.total - banks  # without what is not known where the compiler refused
    if held + least * knob.growth > report.allowed:
        return []  # not even with one adapter; nothing needs to be compiled for that
    blocks, best, _ = largest(report, knob, plan.bank_blocks, report.memory)
    if best is None:
        return []
    lanes = (blocks - 1) * plan.quantum
    adapters = lanes // (plan.most_blocks * plan.quantum)
    if config.asked.file.lora.resident_lanes is None and adapters >= plan.slots[-1]:
        return [f"`max_adapters: {adapters}` in lora fits"]
    return [f"`resident_lanes: {lanes}` in lora fits"]


def _both(config: Config, report: MemoryReport, say: Callable[[str], None]) -> list[str]:
    """The longest cache beside banks of as many of the largest adapters as run at once, or one."""
    plan = config.plan
    if plan.cache is None or not report.memory.banks:
        return []
    for adapters in sorted({plan.slots[-1], 1}, reverse=True):
        blocks = 1 + adapters * plan.most_blocks
        if blocks >= plan.bank_blocks:
            continue
        lanes = (blocks - 1) * plan.quantum
        say(f"{report.target}: trying lora.resident_lanes {lanes}")
        fewer = replace(config, plan=replace(plan, bank_blocks=blocks))
        found = memory_report(fewer, report.target, say=say)
        if found.length:
            cache = f"{{sequences: {plan.cache.sequences}, length: {found.length}}}"
            return [f"`resident_lanes: {lanes}` in lora and `kv_cache: {cache}` fit together"]
    return []


def _larger_share(report: MemoryReport) -> list[str]:
    needed = math.ceil(100 * report.memory.total / report.device) / 100
    if report.memory.refused or needed > 1:
        return []
    return [f"`limits: {{hbm_fraction: {needed:g}}}` allows it"]


def _nothing(config: Config, report: MemoryReport) -> str:
    plan, memory = config.plan, report.memory
    banks = memory.banks // plan.bank_blocks * min(1 + plan.most_blocks, plan.bank_blocks)
    cache = cache_bytes(plan, length=STEP) if plan.cache else 0
    least = memory.weights + banks + min(cache, memory.cache)
    return (
        f"nothing fits: weights, the banks of one adapter and a cache of {STEP} tokens take "
        f"{least / _GIB:.2f} GiB before anything runs; use more devices (mesh.tp) or larger ones, "
        "or fewer modules in lora.modules"
    )
