"""What a trace asks of an axis, and what each policy of buckets wastes on it. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from aot_lora.errors import PlanError
from aot_lora.plan.axes import pow2_buckets, step_buckets
from aot_lora.plan.fit import (
    BucketUse,
    Cost,
    Ints,
    excess,
    fit,
    histogram,
    padded_tokens,
    usage,
    waste,
)
from aot_lora.plan.plan import round_up
from aot_lora.plan.simulate import Server, Steps, Traffic, cut_in_halves, simulate

Of = Literal["steps", "prompts"]
"""What is fitted: the tokens of simulated steps, or those of whole prompts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Lengths in the order of the trace, in runs.

    Args:
      values: [m] at least 1; repeats: [m] how often in a row.
    """

    values: Ints
    repeats: Ints

    def halves(self, *, later: bool) -> tuple[Lengths, Lengths]:
        """As `cut_in_halves` says."""
        first, second = (
            Lengths(values=self.values[cut], repeats=self.repeats[cut])
            for cut in cut_in_halves(self.repeats, later=later)
        )
        return first, second

    def counted(self) -> tuple[Ints, Ints]:
        """Distinct lengths and how often each occurs."""
        return histogram(self.values, self.repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """Buckets by one policy and their waste on a trace, as padded over real, less one.

    Args:
      name: of the policy; buckets: those that it makes of the whole trace.
      waste: on the whole trace.
      held_out: on every second run of it, if made of the others.
      later: on its later half, if made of the earlier one.
      excess: the cost of the whole trace, padded over as it is, less one.
      used: what lands in each bucket.
    """

    name: str
    buckets: tuple[int, ...]
    waste: float
    held_out: float
    later: float
    excess: float
    used: tuple[BucketUse, ...]


def lengths_of(traffic: Traffic, *, of: Of, server: Server) -> tuple[Lengths, Steps | None]:
    """The lengths that a trace asks of the tokens axis; prompts are clipped to the budget."""
    if of == "prompts":
        clipped = np.minimum(traffic.prompts, server.budget)
        return Lengths(values=clipped, repeats=np.ones_like(clipped)), None
    steps = simulate(traffic, server)
    return Lengths(values=steps.tokens, repeats=steps.repeats), steps


def compare(
    lengths: Lengths,
    *,
    count: int,
    multiple: int,
    budget: int,
    small: bool = False,
    cost: Cost = padded_tokens,
    current: tuple[int, ...] | None = None,
) -> tuple[Policy, ...]:
    """Powers of two, a fixed step, the current buckets if any, and the fit: in this order.

    The step is the smallest multiple of `multiple` that makes no more than `count` buckets; the
    other arguments are those of `fit`.

    Raises:
      PlanError: fewer than two lengths, or as `fit` raises.
    """
    if len(lengths.values) < 2:
        raise PlanError(
            "the trace makes a single step or run of equal ones: none is left to hold out",
            expected="at least 2",
            found=str(len(lengths.values)),
            next_step="record more traffic",
        )

    def fitted(part: Lengths) -> tuple[int, ...]:
        return fit(
            *part.counted(), count=count, multiple=multiple, budget=budget, small=small, cost=cost
        )

    best = fitted(lengths)  # first, for it checks what it is given
    step = round_up(-(-budget // count), multiple)
    made: list[tuple[str, tuple[int, ...], Callable[[Lengths], tuple[int, ...]] | None]] = [
        ("pow2", pow2_buckets(smallest=multiple, budget=budget), None),
        (f"step {step}", step_buckets(step=step, budget=budget), None),
        *([] if current is None else [("current", current, None)]),
        (f"fit {count}", best, fitted),
    ]
    policies: list[Policy] = []
    for name, buckets, again in made:
        out: list[float] = []
        for later in (False, True):
            first, second = lengths.halves(later=later)
            out.append(waste(again(first) if again else buckets, *second.counted()))
        policies.append(
            Policy(
                name=name,
                buckets=buckets,
                waste=waste(buckets, *lengths.counted()),
                held_out=out[0],
                later=out[1],
                excess=excess(buckets, *lengths.counted(), cost=cost),
                used=usage(buckets, *lengths.counted()),
            )
        )
    return tuple(policies)
