"""Buckets fitted to traffic: the exact optimum for a count of buckets. Pure; numpy only.

What is fitted is a list of lengths (tokens of a step, tokens of a prompt, adapters of a step) with
how often each occurs. A length pays the cost of the bucket that holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from aot_lora.errors import PlanError
from aot_lora.plan.axes import Axis

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Cost = Callable[[Ints], npt.NDArray[Any]]
"""Cost of one step padded to each of these buckets; it never falls as the bucket grows."""

_MOST_BUCKETS = 10_000  # as a config allows
_MOST_BUDGET = 2**31 - 1
_MOST_CELLS = 50_000_000  # choices that the search remembers, 4 bytes each
_ROUNDS = 32  # of the vectorised hull, before the rest is done point by point


def padded_tokens(buckets: Ints) -> Ints:
    """The cost of a step as the tokens that it is padded to."""
    return buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The cost of a step in seconds: its arithmetic or its bytes, whichever takes longer.

    See Williams, Waterman, Patterson: "Roofline", CACM 52(4), 2009.

    Args:
      flops_per_token: two for each weight that a token is multiplied with.
      bytes_per_step: read whatever the tokens, above all the weights.
      bytes_per_token: activations and cache that each token moves.
      flops_per_second, bytes_per_second: of the device.
    """

    flops_per_token: float
    bytes_per_step: float
    bytes_per_token: float = 0.0
    flops_per_second: float
    bytes_per_second: float

    def __call__(self, buckets: Ints) -> Floats:
        """Seconds of a step at each bucket."""
        compute = buckets * (self.flops_per_token / self.flops_per_second)
        moved = self.bytes_per_step + buckets * self.bytes_per_token
        return np.maximum(compute, moved / self.bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketUse:
    """What lands in one bucket.

    Args:
      bucket: its size.
      steps: how many lengths it holds; real: their sum.
    """

    bucket: int
    steps: int
    real: int

    @property
    def waste(self) -> float:
        """Padded over real, less one; 0 where nothing lands."""
        return self.bucket * self.steps / self.real - 1 if self.real else 0.0


def histogram(lengths: npt.ArrayLike, counts: npt.ArrayLike | None = None) -> tuple[Ints, Ints]:
    """Distinct lengths in order, and how often each occurs."""
    values, where = np.unique(np.asarray(lengths, np.int64), return_inverse=True)
    weights = None if counts is None else np.asarray(counts, np.int64)
    return values, np.bincount(where, weights, len(values)).astype(np.int64)


def usage(buckets: tuple[int, ...], lengths: Ints, counts: Ints) -> tuple[BucketUse, ...]:
    """What lands in each bucket.

    Raises:
      PlanError: the buckets are no axis, or a length is above the last one.
    """
    Axis(name="tokens", buckets=buckets)
    if len(lengths) and int(lengths.max()) > buckets[-1]:
        raise PlanError(
            "a length is above the last bucket",
            expected=f"at most {buckets[-1]}",
            found=str(lengths.max()),
            next_step="clip the lengths, or raise the budget",
        )
    where = np.searchsorted(buckets, lengths)
    steps = np.bincount(where, counts, len(buckets))
    real = np.bincount(where, counts * lengths, len(buckets))
    return tuple(
        BucketUse(bucket=bucket, steps=int(n), real=int(tokens))
        for bucket, n, tokens in zip(buckets, steps, real, strict=True)
    )


def waste(buckets: tuple[int, ...], lengths: Ints, counts: Ints) -> float:
    """Padded tokens over real tokens, less one."""
    used = usage(buckets, lengths, counts)
    real = sum(use.real for use in used)
    return sum(use.bucket * use.steps for use in used) / real - 1 if real else 0.0


def excess(buckets: tuple[int, ...], lengths: Ints, counts: Ints, *, cost: Cost) -> float:
    """Cost of the padded steps over that of steps without padding, less one."""
    used = usage(buckets, lengths, counts)
    padded = float(cost(np.asarray(buckets)) @ np.asarray([use.steps for use in used]))
    real = float(cost(lengths) @ counts)
    return padded / real - 1 if real else 0.0


def fit(
    lengths: Ints,
    counts: Ints,
    *,
    count: int,
    multiple: int,
    budget: int,
    small: bool = False,
    cost: Cost = padded_tokens,
) -> tuple[int, ...]:
    """At most `count` buckets of the least total cost; the last one is the budget.

    Exact. With the lengths in order, W the prefix sums of their counts and c the cost of a bucket,
    the best cost of the first j lengths in k buckets is

        D[k, j] = W[j] c[j] + min over i of (D[k - 1, i] - W[i] c[j])

    which is the lower hull of the points (W[i], D[k - 1, i]) asked for its tangent of slope c[j]:
    O(count n log n). No i above j needs to be ruled out: lengths beyond j pay at least c[j] each,
    so that such an i is never better than i = j.

    Args:
      lengths: [n] from 1 to `budget`; counts: [n] how often each occurs.
      count: the most buckets, the budget's own included.
      multiple: each bucket but the budget is a multiple of it.
      budget: the last bucket.
      small: whether powers of two below `multiple` are buckets as well.
      cost: of one step at each bucket.

    Raises:
      PlanError: no such buckets, or more than can be searched; it says what would fit.
    """
    check(lengths, counts, count=count, multiple=multiple, budget=budget)
    sizes, weights = candidates(lengths, counts, multiple=multiple, budget=budget, small=small)
    n = len(sizes)
    if count >= n:
        return tuple(sizes.tolist())
    if n * count > _MOST_CELLS:
        raise PlanError(
            f"{n:,} distinct lengths in {count:,} buckets are too many to search",
            expected=f"at most {_MOST_CELLS:,} lengths times buckets",
            found=f"{n * count:,}",
            next_step=f"ask for at most {_MOST_CELLS // n:,} buckets, "
            f"or for multiples of {multiple * -(-n * count // _MOST_CELLS)}",
        )
    costs = np.asarray(cost(sizes), np.float64)
    if not np.isfinite(costs).all() or costs[0] < 0 or (np.diff(costs) < 0).any():
        raise PlanError(
            "the cost of a step falls as its bucket grows, or is no cost",
            expected="finite numbers from 0 that never fall",
            found=f"{costs[:4].tolist()} ... {costs[-1]} for {sizes[:4].tolist()} ... {budget}",
        )
    chosen = _search(weights, costs, count)
    return tuple(sizes[chosen].tolist())


def candidates(
    lengths: Ints, counts: Ints, *, multiple: int, budget: int, small: bool
) -> tuple[Ints, Ints]:
    """The only sizes that buckets need to be chosen from, and how many lengths round up to each.

    Args:
      lengths, counts, multiple, budget, small: as for `fit`.
    """
    rounded = -(-lengths // multiple) * multiple
    if small:
        powers = 2 ** np.ceil(np.log2(np.minimum(lengths, multiple))).astype(np.int64)
        rounded = np.where(lengths < multiple, np.minimum(powers, multiple), rounded)
    rounded = np.minimum(rounded, budget)
    sizes, weights = histogram(rounded, counts)
    sizes, weights = sizes[weights > 0], weights[weights > 0]
    if sizes[-1] != budget:
        sizes, weights = np.append(sizes, budget), np.append(weights, 0)
    return sizes, weights


def _search(weights: Ints, costs: Floats, count: int) -> list[int]:
    """Positions of the chosen buckets, in order; the last one is always among them."""
    n = len(costs)
    before = np.concatenate(([0], np.cumsum(weights)))  # W[i]: lengths in the first i sizes
    # W[n] may equal W[n - 1], and nothing starts behind the last bucket: it is no point.
    points = before[:-1].astype(np.float64)
    alone = before[1:] * costs
    best = alone
    choices: list[npt.NDArray[np.int32]] = []
    for _ in range(count - 1):
        starts = np.concatenate(([0.0], best[:-1]))  # D[k - 1, i] of i = 0 .. n - 1
        hull = _lower_hull(points, starts)
        slopes = np.diff(starts[hull]) / np.diff(points[hull])
        chosen = hull[np.searchsorted(slopes, costs)]
        chosen = np.minimum(chosen, np.arange(1, n + 1))
        chosen[-1] = min(int(chosen[-1]), n - 1)
        kept = chosen == np.arange(1, n + 1)  # i = j: one bucket fewer is as good
        value = alone - points[np.minimum(chosen, n - 1)] * costs
        value += starts[np.minimum(chosen, n - 1)]
        best = np.where(kept, best, value)
        choices.append(chosen.astype(np.int32))
    found: list[int] = []
    at = n
    for chosen in [*reversed(choices), np.zeros(n, np.int32)]:
        if at == 0:
            break
        start = int(chosen[at - 1])
        if start != at:
            found.append(at - 1)
        at = start
    return found[::-1]


def _lower_hull(x: Floats, y: Floats) -> Ints:
    """Positions of the lower convex hull's corners; `x` rises strictly."""
    kept = np.arange(len(x))
    for _ in range(_ROUNDS):
        slopes = np.diff(y[kept]) / np.diff(x[kept])
        # A point on or above the line between two others is no corner, whatever else goes.
        corner = np.concatenate(([True], slopes[:-1] < slopes[1:], [True]))[: len(kept)]
        if corner.all():
            return kept
        kept = kept[corner]
    return kept[_chain(x[kept].tolist(), y[kept].tolist())]


def _chain(x: list[float], y: list[float]) -> list[int]:
    hull: list[int] = []
    for c in range(len(x)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[c] - x[b]) < (y[c] - y[b]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(c)
    return hull


def check(lengths: Ints, counts: Ints, *, count: int, multiple: int, budget: int) -> None:
    """Refuses what `fit` cannot fit.

    Raises:
      PlanError: it says what would fit.
    """
    if count < 1:
        raise PlanError("no buckets were asked for", expected="a count of at least 1")
    if count > _MOST_BUCKETS:
        raise PlanError(
            f"{count:,} buckets were asked for", expected=f"a count of at most {_MOST_BUCKETS:,}"
        )
    if multiple < 1:
        raise PlanError(
            f"buckets cannot be multiples of {multiple}", expected="for instance 8 or 16"
        )
    if budget > _MOST_BUDGET:
        raise PlanError(f"a budget of {budget:,}", expected=f"at most {_MOST_BUDGET:,}")
    if budget < multiple:
        raise PlanError(
            f"the budget {budget} is below the smallest bucket {multiple}",
            expected=f"a budget of at least {multiple}"
            + (f", or multiples of at most {budget}" if budget > 0 else ""),
        )
    if not len(lengths) or not counts.sum():
        raise PlanError("there are no lengths to fit", expected="at least one")
    if int(counts.min()) < 0:
        raise PlanError("a length occurs less than never", found=str(counts.min()))
    low, high = int(lengths.min()), int(lengths.max())
    if low < 1 or high > budget:
        raise PlanError(
            "a length is outside the budget",
            expected=f"1 to {budget}",
            found=str(low if low < 1 else high),
            next_step="clip the lengths, or raise the budget",
        )
