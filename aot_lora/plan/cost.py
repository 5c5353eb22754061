"""Estimates that are known before a single compile: seconds and bytes."""

from __future__ import annotations

import os
from dataclasses import dataclass

from aot_lora.plan.variants import TargetSpec

# Core-seconds to trace, lower, compile and write one LoRA variant, start of the workers included,
# and stored bytes of it. cpu and tpu: cold warmups of cpu/quickstart and tpu-v6e/llama-3.1-8b on
# 2 x86-64 cores, as `tools/bench/warmup.py second` prints them. cuda: gpu-h200/llama-3.1-8b on an
# H200 with jax 0.11.2, one worker, most of it autotuning; without a GPU the same preset on those 2
# cores, where nothing is autotuned. An estimate, never a promise.
_PER_VARIANT = {
    "cpu": (0.08, 5_000),
    "tpu": (0.48, 64_000),
    "cuda": (0.41, 9_400),
    "cuda without a GPU": (0.30, 9_800),
}

# The same of any other program, as if it were a whole step of a decoder. tpu: `tools/bench/step.py
# compile`; cuda: what `step.py serve` says it compiles on an H200, and Llama-3.1-8B's steps of 16
# and 2,048 tokens without a GPU; cpu: those of the model `tiny`.
_PER_STEP = {
    "cpu": (2.7, 72_000),
    "tpu": (14.0, 2_400_000),
    "cuda": (11.0, 1_300_000),
    "cuda without a GPU": (25.0, 1_300_000),
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


def estimate(*, target: TargetSpec, variants: int, cores: int, step_share: float = 0.0) -> Estimate:
    """Estimates a cold warmup of `variants` variants on `cores` cores.

    Args:
      target: what they are for.
      variants, cores: how many.
      step_share: part of them that are steps, 0 to 1; the others are LoRA programs.
    """
    host = "cuda without a GPU" if target.target_config else target.platform
    core_seconds, variant_bytes = (
        (1 - step_share) * kernel + step_share * step
        for kernel, step in zip(_PER_VARIANT[host], _PER_STEP[host], strict=True)
    )
    at_hand = target.platform == "cuda" and not target.deviceless
    cores = 1 if at_hand else cores  # see `warmup.run`: one worker per GPU
    return Estimate(
        seconds=round(core_seconds * variants / cores, 1),
        store_bytes=round(variant_bytes * variants),
        cores=cores,
    )
