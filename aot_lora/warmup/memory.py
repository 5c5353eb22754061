"""Does a plan fit the memory of its devices, and how long may its cache be? By compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aot_lora.config import Config
from aot_lora.errors import AotLoraError
from aot_lora.plan import KvCache, TargetSpec, Variant, usable_cores
from aot_lora.plan.memory import Measured, Memory, add_up, cache_bytes, largest_variants
from aot_lora.targets.hbm import hbm_bytes
from aot_lora.warmup.job import Job
from aot_lora.warmup.measure import measure
from aot_lora.warmup.pool import run_all

STEP = 128
"""The lengths of a cache that are looked at are multiples of this many tokens."""

_ROUNDS = 10  # of compiling; the first two come within a few steps of the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Whether a plan fits a target.

    Args:
      target: the target.
      memory: what the plan needs; with `refused`, what is known of it.
      device: memory of each device, in bytes; 0 where unknown.
      allowed: bytes of it that the config lets the plan have.
      length: the longest kv_cache.length that fits, a multiple of `STEP`, verified by compiling;
        0 where even `STEP` does not fit; None for a plan without a cache or an unknown device.
      at_length: what the plan needs with a cache of that length.
      exact: whether one `STEP` more is known not to fit.
    """

    target: TargetSpec
    memory: Memory
    device: int
    allowed: int
    length: int | None = None
    at_length: Memory | None = None
    exact: bool = False

    @property
    def fits(self) -> bool:
        """Whether the plan as written fits; where the device is unknown, nothing says no."""
        return not self.memory.refused and (not self.device or self.memory.total <= self.allowed)


def memory_report(
    config: Config, target: TargetSpec, *, say: Callable[[str], None] = lambda _: None
) -> MemoryReport:
    """Measures a config's plan for a target, in worker processes.

    Args:
      config: from `load_config`.
      target: one of its targets.
      say: told what is being compiled.

    Raises:
      ProgramError: a program cannot be traced or compiled, for another reason than memory.
      UnsupportedError: this host cannot compile for the target.
    """
    say(f"{target}: compiling the largest step of each program")
    measured = measure_all(config, target, largest_variants(config.plan))
    memory = add_up(config.plan, measured)
    device = hbm_bytes(target) or max((one.device for one in measured), default=0)
    allowed = int(device * config.hbm_fraction)
    report = MemoryReport(target=target, memory=memory, device=device, allowed=allowed)
    if not device or config.plan.cache is None:
        return report
    return _with_length(report, config, measured, say)


def measure_all(config: Config, target: TargetSpec, variants: Sequence[Variant]) -> list[Measured]:
    """What variants of a config's plan need of a target, in worker processes."""
    job = Job(config=config, target=target, parts={})
    workers = min(usable_cores(), len(variants))
    found: list[Measured] = []
    for outcome in run_all(job, measure, list(variants), workers):
        if isinstance(outcome, AotLoraError):
            raise outcome
        found.append(outcome)
    return sorted(found, key=lambda one: variants.index(one.variant))


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """Something of which a device holds as much as fits.

    Args:
      growth: bytes that one unit of it takes by itself.
      least: the fewest units that make sense; most: units that are known not to fit.
      held: bytes of all units, of what was measured.
      measure: what a plan with so many units needs.
    """

    growth: int
    least: int = 1
    most: int
    held: Callable[[Memory], int]
    measure: Callable[[int], Memory]


def largest(
    report: MemoryReport, knob: Knob, at: float, memory: Memory
) -> tuple[int, Memory | None, bool]:
    """Searches between units that fit (`low`) and units that do not (`high`).

    Args:
      report: for what is allowed.
      knob: what is turned; at, memory: how far it is now, and what was measured there.

    Returns:
      The most units that fit by compiling (one less than `least` where none do), what they need,
      and whether one more is known not to.
    """
    low, high = knob.least - 1, knob.most
    best: Memory | None = None
    for round_ in range(_ROUNDS + 1):
        fits = not memory.refused and memory.total <= report.allowed
        if fits and at >= max(low, knob.least):
            low, best = int(at), memory
        elif not fits:
            high = min(high, -int(-at // 1))
        # One more would fit only if temporaries shrank: by itself it is larger than what is left
        full = fits and low == at and report.allowed - memory.total < knob.growth
        if full or high - low <= 1 or round_ == _ROUNDS:
            break
        refused_again = round_ > 0 and memory.refused
        guess = (low + high) // 2 if refused_again else _guess(report, knob, at, memory)
        at = max(low + 1, min(high - 1, guess))
        memory = knob.measure(at)
    full = best is not None and report.allowed - best.total < knob.growth
    return low, best, high - low <= 1 or full


def _guess(report: MemoryReport, knob: Knob, at: float, memory: Memory) -> int:
    """The units that would just fit if temporaries and padding grew with them."""
    grown = memory.temporaries + memory.others  # a device pads a cache of narrow heads
    held = memory.total - knob.held(memory) - grown
    if memory.refused:  # Then both are unknown.
        return int((report.allowed - held) * 0.95 / knob.growth)
    return int((report.allowed - held) / (knob.growth + grown / at))


def _with_length(
    report: MemoryReport,
    config: Config,
    measured: Sequence[Measured],
    say: Callable[[str], None],
) -> MemoryReport:
    plan = config.plan
    assert plan.cache is not None
    growth = cache_bytes(plan, length=STEP)
    steps = [one.variant for one in measured if one.cache]
    rest = [one for one in measured if not one.cache]

    def measure_at(units: int) -> Memory:
        say(f"{report.target}: trying kv_cache.length {units * STEP}")
        longer = with_length(config, units * STEP)
        return add_up(plan, [*rest, *measure_all(longer, report.target, steps)])

    knob = Knob(
        growth=growth,
        most=report.device // growth + 1,
        held=lambda memory: memory.cache,
        measure=measure_at,
    )
    length, best, exact = largest(report, knob, plan.cache.length / STEP, report.memory)
    return replace(report, length=length * STEP, at_length=best, exact=exact)


def with_length(config: Config, length: int) -> Config:
    """The config with a cache of another length; its variants stay."""
    plan = config.plan
    assert plan.cache is not None
    cache = KvCache(sequences=plan.cache.sequences, length=length)
    return replace(config, plan=replace(plan, cache=cache))
