"""The steps that a server makes, by their tokens and their adapters. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from aot_lora.plan.fit import Cost, Floats, Ints
from aot_lora.plan.plan import Plan
from aot_lora.plan.simulate import Steps

LaneCost = Callable[[int], Cost]
"""For a batch padded to so many lanes: the cost of a step at each token bucket.

It never falls as tokens or lanes grow.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """How often a server makes each kind of step.

    A trace names the adapters of its requests but not their ranks: each adapter is taken to have
    one of `ranks` as often as `shares` says, whatever the others have.

    Args:
      tokens: [n] of a step, rising; slots: [m] adapters active in it, rising.
      counts: [n, m] how often, or how much it weighs.
      ranks: [r] that an adapter may have; shares: [r] how likely, 1 in all.
    """

    tokens: Ints
    slots: Ints
    counts: Floats
    ranks: Ints
    shares: Floats

    def within(self, quantum: int) -> Floats:
        """Shares [m, b] of batches of each count of adapters that own at most b blocks."""
        blocks = -(-self.ranks // quantum)
        one = np.bincount(blocks, self.shares)
        most = int(self.slots[-1]) if len(self.slots) else 0
        width = most * (len(one) - 1) + 1
        owned = np.zeros((most + 1, width))
        owned[0, 0] = 1.0
        for count in range(1, most + 1):
            owned[count] = np.convolve(owned[count - 1], one)[:width]
        return np.cumsum(owned[self.slots], axis=1)


def mix_of_points(plan: Plan, cost: LaneCost) -> Mix:
    """Without a trace: each point of the grid as often, and padding counts relative to its step.

    So of tokens 16, 32, 64 the first costs as much to drop as the second, each doubling its steps.
    """
    ranks = np.asarray(plan.ranks, np.int64)
    mix = Mix(
        tokens=np.asarray(plan.tokens.buckets, np.int64),
        slots=np.asarray(plan.slots, np.int64),
        counts=np.ones((len(plan.tokens.buckets), len(plan.slots))),
        ranks=ranks,
        shares=np.full(len(ranks), 1 / len(ranks)),
    )
    mean_lanes = float(mix.ranks @ mix.shares)
    own = [cost(round(count * mean_lanes))(mix.tokens) for count in plan.slots]
    return Mix(
        tokens=mix.tokens,
        slots=mix.slots,
        counts=1 / np.maximum(np.stack(own, axis=1).astype(np.float64), 1e-300),
        ranks=mix.ranks,
        shares=mix.shares,
    )


def mix_of_steps(
    steps: Steps,
    plan: Plan,
    *,
    ranks: tuple[Ints, Ints] | None = None,
) -> Mix:
    """The steps of a trace.

    Args:
      steps: as simulated. Without adapters in the trace each of the plan's slots is as likely.
      plan: whose slots and ranks stand in for what the trace does not say.
      ranks: of adapters, and how many have each; None for each of the plan's as likely.
    """
    tokens, where = np.unique(steps.tokens, return_inverse=True)
    if steps.slots is None:
        slots = np.asarray(plan.slots, np.int64)
        totals = np.bincount(where, steps.repeats, len(tokens))
        counts = np.outer(totals, np.full(len(slots), 1 / len(slots)))
    else:
        slots, which = np.unique(steps.slots, return_inverse=True)
        flat = np.bincount(where * len(slots) + which, steps.repeats, len(tokens) * len(slots))
        counts = flat.reshape(len(tokens), len(slots))
    values = np.asarray(plan.ranks, np.int64) if ranks is None else ranks[0]
    weights = np.ones(len(values)) if ranks is None else ranks[1].astype(np.float64)
    return Mix(
        tokens=tokens.astype(np.int64),
        slots=slots.astype(np.int64),
        counts=counts.astype(np.float64),
        ranks=values,
        shares=weights / weights.sum(),
    )
