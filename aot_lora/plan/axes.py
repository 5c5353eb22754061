"""Axes and their buckets: the only place that turns a length into a bucket."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

from aot_lora.errors import OutOfPlanError, PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A bucketed dimension.

    Args:
      name: ``tokens``, ``lanes``, ...
      buckets: sorted, distinct, none negative; not empty.
    """

    name: str
    buckets: tuple[int, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(set(self.buckets)))
        if not ordered or ordered != self.buckets or ordered[0] < 0:
            raise PlanError(
                f"axis {self.name} has bad buckets",
                expected="sorted, distinct, non-negative, at least one",
                found=str(list(self.buckets)),
            )

    def bucket(self, length: int) -> int:
        """Returns the smallest bucket that holds `length`.

        Raises:
          OutOfPlanError: `length` is negative or above the last bucket.
        """
        buckets = self.buckets
        index = bisect_left(buckets, length)
        if index == len(buckets) or length < 0:
            raise OutOfPlanError(
                f"{length} {self.name} are outside the plan",
                expected=f"0 to {buckets[-1]} {self.name}",
                found=f"{length}; the nearest bucket is {buckets[-1 if length > 0 else 0]}",
                next_step=f"send a smaller batch, or raise the {self.name} axis and run warmup",
            )
        return buckets[index]


def pow2_buckets(*, smallest: int, budget: int) -> tuple[int, ...]:
    """Powers of two times `smallest` below `budget`, and `budget` itself."""
    buckets: list[int] = []
    value = smallest
    while value < budget:
        buckets.append(value)
        value *= 2
    return (*buckets, budget)


def step_buckets(*, step: int, budget: int) -> tuple[int, ...]:
    """Multiples of `step` below `budget`, and `budget` itself."""
    return (*range(step, budget, step), budget)


def mean_waste(axis: Axis) -> tuple[tuple[int, float], ...]:
    """Padding waste per bucket when each length that lands in it is equally likely.

    Returns:
      (bucket, share of its rows that are padding, 0 to 1) for each bucket above zero.
    """
    wastes: list[tuple[int, float]] = []
    below = 0
    for bucket in axis.buckets:
        if bucket > 0:
            mean_length = (below + 1 + bucket) / 2
            wastes.append((bucket, 1 - mean_length / bucket))
        below = bucket
    return tuple(wastes)


def gaps(axis: Axis, *, ratio: float = 2.0) -> tuple[tuple[int, int, float, int], ...]:
    """Neighbouring buckets further apart than `ratio`.

    Returns:
      (lower, upper, worst padding 0 to 1, a bucket to add between) for each gap.
    """
    found: list[tuple[int, int, float, int]] = []
    for lower, upper in zip(axis.buckets, axis.buckets[1:], strict=False):
        if lower > 0 and upper > ratio * lower:
            found.append((lower, upper, 1 - (lower + 1) / upper, 2 * lower))
    return tuple(found)
