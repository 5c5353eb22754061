"""What a warmup may cost, and what a plan of so many variants costs it. Pure."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from aot_lora.plan.cost import estimate
from aot_lora.plan.variants import TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most that a warmup may take, for all targets together; None for no limit.

    Args:
      variants: executables.
      seconds: estimated wall time on the host that compiles.
      store_bytes: estimated bytes in the store.
    """

    variants: int | None = None
    seconds: float | None = None
    store_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a cold warmup is estimated to take, for all targets together.

    Args:
      variants: executables; targets: for how many targets they are, each the same.
      seconds: wall time on `cores` cores; store_bytes: in the store.
    """

    variants: int
    targets: int
    seconds: float
    store_bytes: int
    cores: int

    def __str__(self) -> str:
        each = f" for {self.targets} targets" if self.targets > 1 else ""
        return (
            f"{self.variants:,} variants{each}, about {self.seconds:,.0f} s on {self.cores} cores "
            f"and {self.store_bytes / 2**20:,.0f} MiB"
        )


def bill(
    variants: int, targets: Sequence[TargetSpec], *, cores: int, step_share: float = 0.0
) -> Bill:
    """What a plan of `variants` variants costs for some targets, one after the other.

    `step_share`: see `Plan.step_share`.
    """
    costs = [
        estimate(target=target, variants=variants, cores=cores, step_share=step_share)
        for target in targets
    ]
    return Bill(
        variants=variants * len(costs),
        targets=len(costs),
        seconds=round(sum(cost.seconds for cost in costs), 1),
        store_bytes=sum(cost.store_bytes for cost in costs),
        cores=max(cost.cores for cost in costs),
    )


def broken(found: Bill, limits: Limits) -> str | None:
    """The name of the first limit that a bill is above, or None."""
    for name in ("variants", "seconds", "store_bytes"):
        limit = getattr(limits, name)
        if limit is not None and getattr(found, name) > limit:
            return name
    return None


def most_variants(
    limits: Limits,
    targets: Sequence[TargetSpec],
    *,
    cores: int,
    above: int,
    step_share: float = 0.0,
) -> int:
    """The most variants of each target that no limit refuses, looked for below `above`."""

    def refused(size: int) -> bool:
        return broken(bill(size, targets, cores=cores, step_share=step_share), limits) is not None

    return max(bisect_right(range(above), False, key=refused) - 1, 0)
