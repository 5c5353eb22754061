"""Does a plan fit the memory of its devices, and how long may its cache be? By compiling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, PlanError
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
    measured = _measure(config, target, largest_variants(config.plan))
    memory = add_up(config.plan, measured)
    device = hbm_bytes(target) or max((one.device for one in measured), default=0)
    allowed = int(device * config.hbm_fraction)
    report = MemoryReport(target=target, memory=memory, device=device, allowed=allowed)
    if not device or config.plan.cache is None:
        return report
    return _with_length(report, config, measured, say)


def _measure(config: Config, target: TargetSpec, variants: Sequence[Variant]) -> list[Measured]:
    job = Job(config=config, target=target, parts={})
    workers = min(usable_cores(), len(variants))
    found: list[Measured] = []
    for outcome in run_all(job, measure, list(variants), workers):
        if isinstance(outcome, AotLoraError):
            raise outcome
        found.append(outcome)
    return sorted(found, key=lambda one: variants.index(one.variant))


def _with_length(
    report: MemoryReport,
    config: Config,
    measured: Sequence[Measured],
    say: Callable[[str], None],
) -> MemoryReport:
    """Searches between a length that fits (`low`) and one that does not (`high`)."""
    plan = config.plan
    assert plan.cache is not None
    growth = cache_bytes(plan, length=STEP)
    low, high = 0, report.device // growth + 1  # in steps
    best: Memory | None = None
    steps = [one.variant for one in measured if one.cache]
    rest = [one for one in measured if not one.cache]
    memory, at = report.memory, plan.cache.length / STEP
    for round_ in range(_ROUNDS + 1):
        fits = not memory.refused and memory.total <= report.allowed
        if fits and at >= max(low, 1):
            low, best = int(at), memory
        elif not fits:
            high = min(high, -int(-at // 1))
        # One more would fit only if temporaries shrank: the cache alone is larger than what is left
        full = fits and low == at and report.allowed - memory.total < growth
        if full or high - low <= 1 or round_ == _ROUNDS:
            break
        refused_again = round_ > 0 and memory.refused
        guess = (low + high) // 2 if refused_again else _guess(report, memory, at, growth)
        at = max(low + 1, min(high - 1, guess))
        say(f"{report.target}: trying kv_cache.length {at * STEP}")
        longer = _measure(with_length(config, at * STEP), report.target, steps)
        memory = add_up(plan, [*rest, *longer])
    exact = high - low <= 1 or (best is not None and report.allowed - best.total < growth)
    return replace(report, length=low * STEP, at_length=best, exact=exact)


def _guess(report: MemoryReport, memory: Memory, at: float, growth: int) -> int:
    """The length in steps that would just fit if temporaries and padding grew as the cache does."""
    grown = memory.temporaries + memory.others  # a device pads a cache of narrow heads
    held = memory.total - memory.cache - grown
    if memory.refused:  # Then both are unknown.
        return int((report.allowed - held) * 0.95 / growth)
    return int((report.allowed - held) / (growth + grown / at))


def with_length(config: Config, length: int) -> Config:
    """The config with a cache of another length; its variants stay."""
    plan = config.plan
    assert plan.cache is not None
    cache = KvCache(sequences=plan.cache.sequences, length=length)
    return replace(config, plan=replace(plan, cache=cache))


def refuse_what_does_not_fit(config: Config, report: MemoryReport) -> None:
    """Raises where a plan needs more than the config's share of a device.

    Raises:
      PlanError: with the figures, and the cheapest change that fits.
    """
    if report.fits:
        return
    memory, gib = report.memory, 2**30
    found = memory.refused or f"{memory.total / gib:.2f} GiB, {memory.total / report.device:.0%}"
    share = f"{config.hbm_fraction:.0%} of {report.device / gib:.2f} GiB"
    raise PlanError(
        "the plan needs more memory than a device may give it",
        where=f"{config.path}: {report.target}",
        expected=f"at most {report.allowed / gib:.2f} GiB on each device, "
        f"limits.hbm_fraction {config.hbm_fraction:g}: {share}",
        found=found,
        next_step=_cheapest(config, report),
    )


def _cheapest(config: Config, report: MemoryReport) -> str:
    cache, best = config.plan.cache, report.at_length
    if cache is None or best is None:
        return "hold fewer adapters (lora.resident_lanes), or use more or larger devices"
    room = report.allowed - best.total + best.cache
    sequences = room // cache_bytes(
        replace(config.plan, cache=replace(cache, sequences=1)), length=cache.length
    )
    text = f"kv_cache.length {report.length} fits"
    if 0 < sequences < cache.sequences:
        text += f"; so should kv_cache.sequences {sequences} of length {cache.length}"
    return text
