"""What a report shows, gathered before anything is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from aot_lora.plan import Plan
from aot_lora.plan.budget import Bill
from aot_lora.plan.fit import Ints
from aot_lora.plan.lints import TokenUse
from aot_lora.plan.memory import Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that a reader should know first.

    Args:
      kind: ``refused``: `plan` refuses it; ``warning``: of the config; ``lint``: costs more than it
        brings; ``store``: of what was compiled.
      text: what; more: what was expected, found and can be done, a line each.
    """

    kind: Literal["refused", "warning", "lint", "store"]
    text: str
    more: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A variant's executable in the store.

    Args:
      key: of the artifact; variants with the same key share it.
      bytes: size of its file.
      seconds: of the worker that compiled it; None where that is not known.
    """

    key: str
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFacts:
    """What a plan needs of each device of a target.

    Args:
      memory: the figures; with nothing `measured`, what the config declares.
      device: memory of a device in bytes, 0 where unknown; allowed: what the config lets it use.
      longest: the longest kv_cache.length that fits, None where it was not looked for.
    """

    memory: Memory
    device: int
    allowed: int
    longest: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetFacts:
    """A target of a plan.

    Args:
      name: as the config has it.
      estimate: of a cold warmup.
      held: what the store has, by variant; None where that cannot be known on this host.
      forms: of the steps: modules, tokens, lanes, form and why; empty without a decoder.
      form_names: of the steps at each (tokens, lanes).
      memory: what it needs of a device.
    """

    name: str
    estimate: Bill
    held: Mapping[str, Held] | None
    forms: tuple[tuple[str, ...], ...]
    form_names: Mapping[tuple[int, int], tuple[str, ...]]
    memory: MemoryFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficFacts:
    """What a recorded trace makes of the token buckets.

    Args:
      name: of the trace; requests: in it.
      of: what lands in the buckets: ``steps`` or ``prompts``.
      budget, sequences: of the simulated server.
      tokens: [n] distinct tokens of a step; counts: [n] how often each occurs.
      uses: of each bucket.
    """

    name: str
    requests: int
    of: str
    budget: int
    sequences: int
    tokens: Ints
    counts: Ints
    uses: tuple[TokenUse, ...]

    @property
    def steps(self) -> int:
        """How many steps, or prompts."""
        return int(self.counts.sum())

    @property
    def waste(self) -> float:
        """Padded over real of the whole trace, less one."""
        real = int(self.tokens @ self.counts)
        return sum(use.bucket * use.steps for use in self.uses) / real - 1 if real else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """A plan and all that is known of it.

    Args:
      config: name of its file; store: where the store is.
      plan: the plan; waste: share of padding of each token bucket, each length equally likely.
      targets: at least one.
      traffic: under a trace, if there is one.
      findings: the gravest first.
      programs: (name, what it has one variant for each of, what computes it).
      made: when, for people; by: which version.
    """

    config: str
    store: str
    plan: Plan
    waste: tuple[tuple[int, float], ...]
    targets: tuple[TargetFacts, ...]
    traffic: TrafficFacts | None
    findings: tuple[Finding, ...]
    programs: tuple[tuple[str, str, str], ...]
    made: str
    by: str
