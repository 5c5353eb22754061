"""What of a plan is compiled for little or nothing. Pure; numpy only.

Two questions: does recorded traffic use a token bucket, and can any batch at all reach a lanes
bucket? Nothing here is wrong with a plan, so nothing is refused.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Literal

from aot_lora.plan.fit import Ints, usage
from aot_lora.plan.plan import LORA_PROGRAMS, Plan
from aot_lora.plan.variants import Variant

Kind = Literal["never_hit", "little_gain", "unreachable", "never_full", "beyond"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lint:
    """Something of a plan that costs more than it brings.

    Args:
      kind: what of it; axis: ``tokens``, ``lanes`` or ``slots``; bucket: on that axis.
      tokens: the token bucket at which it holds, None for all.
      executables: how many it concerns, for each target.
      text: for people.
    """

    kind: Kind
    axis: str
    bucket: int
    tokens: int | None = None
    executables: int = 0
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUse:
    """What a trace makes of one token bucket.

    Args:
      bucket: its size.
      steps: how many it holds; share: of all steps.
      waste: padded over real, less one, of those steps.
      padding: its share of all padding.
      gain: by how much the waste of the whole trace would rise without it, its steps being padded
        to the next bucket; None for the last one, which has none above it.
      executables: compiled for it, for each target.
    """

    bucket: int
    steps: int
    share: float
    waste: float
    padding: float
    gain: float | None
    executables: int


def token_uses(plan: Plan, tokens: Ints, counts: Ints) -> tuple[TokenUse, ...]:
    """What lands in each token bucket.

    Args:
      plan: whose last bucket holds all.
      tokens: [n] of steps; counts: [n] how often each occurs.

    Raises:
      PlanError: a step is above the last bucket.
    """
    buckets = plan.tokens.buckets
    used = usage(buckets, tokens, counts)
    steps = sum(use.steps for use in used)
    real = sum(use.real for use in used)
    padding = sum(use.bucket * use.steps for use in used) - real
    compiled = Counter(variant.tokens for variant in plan.variants)
    above = (*buckets[1:], None)
    return tuple(
        TokenUse(
            bucket=use.bucket,
            steps=use.steps,
            share=use.steps / steps if steps else 0.0,
            waste=use.waste,
            padding=(use.bucket * use.steps - use.real) / padding if padding else 0.0,
            gain=None
            if larger is None
            else use.steps * (larger - use.bucket) / real
            if real
            else 0.0,
            executables=compiled[use.bucket],
        )
        for use, larger in zip(used, above, strict=True)
    )


def token_lints(uses: tuple[TokenUse, ...], *, least: float = 0.01) -> tuple[Lint, ...]:
    """Buckets that no step hits, and those whose gain is below `least`.

    Each bucket is judged as if the others stayed: of two neighbours that gain little, one may be
    worth its executables once the other is gone.
    """
    found: list[Lint] = []
    for use in uses:
        saved = f"{use.executables} executables"
        if not use.steps and use.gain is None:
            kind, text = "never_hit", f"no step comes near the budget; a lower one saves {saved}"
        elif not use.steps:
            kind, text = "never_hit", f"no step of the trace lands in it; without it {saved} fewer"
        elif use.gain is not None and use.gain < least:
            kind, text = (
                "little_gain",
                f"without it the waste rises by {100 * use.gain:.2f} points, less than "
                f"{100 * least:g}; it takes {saved}",
            )
        else:
            continue
        found.append(
            Lint(
                kind=kind,
                axis="tokens",
                bucket=use.bucket,
                executables=use.executables,
                text=f"tokens {use.bucket}: {text}",
            )
        )
    return tuple(found)


def slot_lints(plan: Plan, slots: Ints | None) -> tuple[Lint, ...]:
    """Whether steps of a trace have more adapters than the plan's slots.

    Args:
      plan: any plan; slots: [m] adapters of the steps, None where the trace has none.
    """
    most = int(slots.max()) if slots is not None and len(slots) else 0
    if most <= plan.slots[-1]:
        return ()
    text = f"slots {plan.slots[-1]}: steps of the trace have up to {most} adapters"
    return (Lint(kind="beyond", axis="slots", bucket=plan.slots[-1], text=text),)


def lane_lints(plan: Plan) -> tuple[Lint, ...]:
    """Lanes buckets that no mix of adapters reaches, or fills.

    Adapters of a batch are distinct and resident, each owns from one block to those of the largest
    rank, and each has at least one row. So T rows have from one block to

        min(lanes of the banks, min(T, max_adapters) * lanes of the largest adapter)

    lanes, and every whole number of blocks between, for ranks between the bins are allowed too. A
    bucket is reached if the one below it is smaller than that. A user's program may be looked up by
    slots and rank, which is more than the adapters own, so for it the banks are no bound. Programs
    of a batch of one adapter have buckets of their own, which are all reached.
    """
    if not plan.with_lanes:
        return ()
    largest = plan.adapter_lanes.buckets[-1]
    capacity = (plan.bank_blocks - 1) * plan.quantum
    out = _unreached(plan, capacity) if plan.with_lora else ()
    found: list[Lint] = []
    for lanes in out:
        count = sum(v.lanes == lanes and _is_lora(v) for v in plan.variants)
        text = (
            f"lanes {lanes}: no batch reaches it, for the banks hold {capacity}; "
            f"{count} executables of LoRA programs"
        )
        found.append(_lanes_lint("unreachable", lanes, None, count, text))
    held = [lanes for lanes in plan.lanes.buckets if lanes not in out]
    if plan.with_lora and held[-1] > capacity:
        text = f"lanes {held[-1]}: no batch fills it, for the banks hold {capacity}"
        found.append(_lanes_lint("never_full", held[-1], None, 0, text))
    by_tokens: dict[int, list[Variant]] = defaultdict(list)
    for variant in plan.variants:
        by_tokens[variant.tokens].append(variant)
    for tokens in plan.tokens.buckets:
        most = min(tokens, plan.max_adapters) * largest
        here = _unreached(plan, most)
        concerned = [
            v.lanes
            for v in by_tokens[tokens]
            if v.lanes in here and not (_is_lora(v) and v.lanes in out)
        ]
        if concerned:
            lanes = sorted(set(concerned))
            text = (
                f"tokens {tokens} with lanes {', '.join(map(str, lanes))}: no batch reaches that, "
                f"for each adapter has a row, so there are at most {most} lanes; "
                f"{len(concerned)} executables"
            )
            found.append(_lanes_lint("unreachable", lanes[0], tokens, len(concerned), text))
    return tuple(found)


def _unreached(plan: Plan, most: int) -> tuple[int, ...]:
    buckets = plan.lanes.buckets
    below = (0, *buckets)
    return tuple(b for b, lower in zip(buckets, below, strict=False) if lower >= most)


def _is_lora(variant: Variant) -> bool:
    return variant.program in LORA_PROGRAMS


def _lanes_lint(kind: Kind, lanes: int, tokens: int | None, count: int, text: str) -> Lint:
    return Lint(kind=kind, axis="lanes", bucket=lanes, tokens=tokens, executables=count, text=text)
