"""Rank bins and the lane quantum, fitted to the ranks of adapters. Pure.

An adapter of rank R owns whole blocks of `quantum` lanes in the banks. Programs that see one
adapter (``bank_write``, and the LoRA of a batch of one) are compiled per bin, the adapter's lanes
rounded up to it, so that each bin costs executables and each lane above the rank costs time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from aot_lora.errors import PlanError
from aot_lora.plan.fit import BucketUse, Ints, fit, histogram, usage
from aot_lora.plan.plan import round_up

QUANTA = (8, 16, 32, 64, 128)
"""Lanes of a block that are tried, as far as the hardware's multiple divides them."""

MOST_RANK = 2**20  # far above any real adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPolicy:
    """Rank bins by one policy, and what all adapters take under it.

    Args:
      name: of the policy.
      ranks: the bins, as ``lora.ranks``; each is a multiple of the quantum.
      quantum: lanes of a block.
      real: ranks of all adapters, added up.
      owned_lanes: lanes of the banks that they own.
      binned_lanes: lanes that they are padded to, one adapter at a time.
      used: what lands in each bin.
    """

    name: str
    ranks: tuple[int, ...]
    quantum: int
    real: int
    owned_lanes: int
    binned_lanes: int
    used: tuple[BucketUse, ...]

    @property
    def waste(self) -> float:
        """Binned lanes over ranks, less one."""
        return self.binned_lanes / self.real - 1

    @property
    def owned_waste(self) -> float:
        """Owned lanes over ranks, less one."""
        return self.owned_lanes / self.real - 1

    @property
    def most_blocks(self) -> int:
        """Blocks of the largest adapter there may be."""
        return self.ranks[-1] // self.quantum


def quanta(multiple: int) -> tuple[int, ...]:
    """The hardware's multiple, and those of `QUANTA` that it divides."""
    return tuple(sorted({multiple, *(q for q in QUANTA if q % multiple == 0)}))


def under(name: str, bins: tuple[int, ...], quantum: int, ranks: Ints, counts: Ints) -> RankPolicy:
    """What adapters take under bins and a quantum, as a plan would round them.

    Raises:
      PlanError: no bins, or a rank above the last one.
    """
    whole = tuple(sorted({round_up(rank, quantum) for rank in bins}))
    lanes = -(-ranks // quantum) * quantum
    used = usage(whole, lanes, counts)
    return RankPolicy(
        name=name,
        ranks=whole,
        quantum=quantum,
        real=int(ranks @ counts),
        owned_lanes=int(lanes @ counts),
        binned_lanes=sum(use.bucket * use.steps for use in used),
        used=usage(whole, ranks, counts),
    )


def by_quantum(ranks: Ints, counts: Ints, *, count: int, multiple: int) -> tuple[RankPolicy, ...]:
    """For each quantum that may be: at most `count` bins of the fewest lanes, exactly.

    Args:
      ranks: [n] ranks of adapters; counts: [n] how many have each.
      count: the most bins.
      multiple: of lanes, that the hardware wants.

    Raises:
      PlanError: no adapters, a rank that cannot be, or as `fit` raises.
    """
    ranks, counts = _checked(ranks, counts, multiple)
    largest = int(ranks.max())
    return tuple(
        under(
            f"fit, quantum {quantum}",
            fit(
                ranks,
                counts,
                count=count,
                multiple=quantum,
                budget=round_up(largest, quantum),
            ),
            quantum,
            ranks,
            counts,
        )
        for quantum in quanta(multiple)
    )


def best(policies: tuple[RankPolicy, ...]) -> RankPolicy:
    """The fewest binned lanes, then the fewest owned, then the fewest blocks an adapter."""
    return min(policies, key=lambda p: (p.binned_lanes, p.owned_lanes, -p.quantum))


def compare_ranks(
    ranks: Ints,
    counts: Ints,
    *,
    count: int,
    multiple: int,
    current: tuple[tuple[int, ...], int] | None = None,
) -> tuple[RankPolicy, ...]:
    """All padded to the largest, the next of 16, 32, 64 ..., the current bins if any, and the fit.

    Args:
      ranks, counts, count, multiple: as for `by_quantum`.
      current: bins and quantum of a config; they hold the largest rank.

    Raises:
      PlanError: as `by_quantum` raises.
    """
    found = best(by_quantum(ranks, counts, count=count, multiple=multiple))
    ranks, counts = _checked(ranks, counts, multiple)
    largest = int(ranks.max())
    whole = round_up(largest, multiple)
    smallest = math.lcm(16, multiple)
    doubled = [smallest]
    while doubled[-1] < largest:
        doubled.append(2 * doubled[-1])
    made = [
        ("all to the largest", (whole,), whole),
        (f"next of {', '.join(map(str, doubled))}", tuple(doubled), smallest),
        *([] if current is None else [("current", *current)]),
        ("fit", found.ranks, found.quantum),
    ]
    return tuple(under(name, bins, quantum, ranks, counts) for name, bins, quantum in made)


def _checked(ranks: Ints, counts: Ints, multiple: int) -> tuple[Ints, Ints]:
    if not 1 <= multiple <= MOST_RANK:
        raise PlanError(
            f"lanes cannot be multiples of {multiple}", expected="for instance 8, 16 or 128"
        )
    ranks, counts = histogram(ranks, counts)
    ranks, counts = ranks[counts > 0], counts[counts > 0]
    if not len(ranks):
        raise PlanError("there are no ranks to fit", expected="at least one adapter")
    low, high = int(np.min(ranks)), int(np.max(ranks))
    if low < 1 or high > MOST_RANK:
        raise PlanError(
            "a rank that cannot be",
            expected=f"1 to {MOST_RANK:,}",
            found=f"{low if low < 1 else high:,}",
        )
    return ranks, counts
