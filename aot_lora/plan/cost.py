"""Estimates that are known before a single compile: seconds and bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aot_lora.errors import PlanError
from aot_lora.plan.plan import Plan

# Core-seconds to trace, lower, compile and write one LoRA variant, and stored bytes of it:
# measured with tools/bench/warmup.py on 2 x86-64 cores. An estimate, never a promise.
_PER_VARIANT = {
    "cpu": (0.06, 6_000),
    "tpu": (0.20, 90_000),
    "cuda": (0.60, 20_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a warmup will take. `seconds` is wall time on `cores` cores; `store_bytes` on disk."""

    seconds: float
    store_bytes: int
    cores: int


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def estimate(*, platform: str, variants: int, cores: int) -> Estimate:
    """Estimates a cold warmup of `variants` variants on `cores` cores."""
    core_seconds, variant_bytes = _PER_VARIANT[platform]
    return Estimate(
        seconds=round(core_seconds * variants / cores, 1),
        store_bytes=variant_bytes * variants,
        cores=cores,
    )


def check_limits(plan: Plan, *, platform: str, max_variants: int, max_store_bytes: int) -> None:
    """Refuses a plan that is larger than its config allows, before any compile.

    Raises:
      PlanError: too many variants, or too many estimated store bytes.
    """
    count = len(plan.variants)
    cost = estimate(platform=platform, variants=count, cores=usable_cores())
    size = (
        f"{count:,} variants, about {cost.seconds:,.0f} s on {cost.cores} cores "
        f"and {cost.store_bytes / 2**20:,.0f} MiB"
    )
    next_step = "use fewer token, slot or rank buckets, or raise the limit"
    if count > max_variants:
        raise PlanError(
            "the plan has too many variants",
            where="limits.variants",
            expected=f"at most {max_variants:,} variants",
            found=size,
            next_step=next_step,
        )
    if cost.store_bytes > max_store_bytes:
        raise PlanError(
            "the plan needs too many bytes in the store",
            where="limits.store_bytes",
            expected=f"at most {max_store_bytes / 2**20:,.0f} MiB",
            found=size,
            next_step=next_step,
        )
