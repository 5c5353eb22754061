"""The grid of token, slots and rank buckets that costs a mix of steps least. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aot_lora.errors import PlanError
from aot_lora.plan.fit import Floats, Ints
from aot_lora.plan.mix import LaneCost, Mix
from aot_lora.plan.partition import partition
from aot_lora.plan.plan import Plan, lane_buckets

_MOST_WORK = 2 * 10**10  # additions of the search, some 20 s


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Buckets of each axis. The last of `tokens` is the budget."""

    tokens: tuple[int, ...]
    slots: tuple[int, ...]
    ranks: tuple[int, ...]


Replan = Callable[[Grid], Plan]
"""The plan that a config makes of a grid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A grid, what it needs and what steps cost under it.

    Args:
      grid: the buckets; variants: of its plan; cost: of all steps of the mix.
    """

    grid: Grid
    variants: int
    cost: float


Pair = tuple[tuple[int, ...], tuple[int, ...]]
"""Slots and ranks."""


class Search:
    """Looks for grids; remembers what several of them share.

    Args:
      mix: the steps.
      replan: makes a plan of a grid; the quantum is the same for all.
      cost: of one step.
      quantum: lanes of a block.
      edges: tokens of which programs of a config are called with no more (``max_tokens``).
    """

    def __init__(
        self,
        mix: Mix,
        replan: Replan,
        cost: LaneCost,
        *,
        quantum: int,
        edges: Sequence[int] = (),
    ) -> None:
        self.mix, self.replan, self.cost, self.quantum = mix, replan, cost, quantum
        self._edges = np.unique(np.asarray(edges, np.int64))
        self.within = mix.within(quantum)
        self._variants: dict[tuple[int, ...], tuple[int, int]] = {}
        self._last: tuple[tuple[int, ...], _Table] | None = None

    def cost_of(self, grid: Grid) -> float:
        """What all steps of the mix cost under a grid."""
        if self._last is None or self._last[0] != grid.tokens:
            self._last = grid.tokens, _Table(self, grid.tokens)
        return self._last[1].cost(self._lanes(grid.slots, grid.ranks))

    def count(self, grid: Grid) -> int:
        """How many variants the plan of a grid has, without making it."""
        sizes = np.asarray(grid.tokens, np.int64)
        fixed, prices = self._prices(sizes, (grid.slots, grid.ranks))
        return fixed + int(prices.sum())

    def as_is(self) -> float:
        """What they would cost without padding: every count of tokens and of blocks its own."""
        table = _Table(self, self.mix.tokens.tolist())
        return table.cost(table.own)

    def best(
        self,
        sizes: Iterable[int],
        pairs: Sequence[Pair],
        *,
        most: int,
        count: int | None = None,
    ) -> Choice | None:
        """The grid of the least cost with at most `most` variants; None where there is none.

        Exact: for each of `pairs` the best token buckets by `partition`, where the price of a
        bucket is its variants. It depends on the bucket below: a program with ``max_tokens`` is
        compiled for each bucket up to the first that holds so many. A pair is left out where even
        its lower bound costs more than a grid that was found.

        Args:
          sizes: token buckets that may be, rising; the last is always among the chosen.
          pairs: slots and ranks that may be.
          most: variants of the plan.
          count: token buckets at most.

        Raises:
          PlanError: more than can be searched.
        """
        table = _Table(self, sizes)
        n = len(table.sizes)
        priced = [self._prices(table.sizes, pair) for pair in pairs]
        layers = [_layers(fixed, prices, most, n, count) for fixed, prices in priced]
        work = n * n * sum(layers)
        if work > _MOST_WORK:
            raise PlanError(
                f"{n:,} token buckets, up to {max(layers):,} of them chosen, with {len(pairs):,} "
                "choices of slots and ranks are too many to search",
                expected=f"at most {_MOST_WORK:,} additions",
                found=f"{work:,}",
                next_step="ask for larger multiples, or for fewer buckets of tokens or slots",
            )
        lanes = [self._lanes(*pair) for pair in pairs]
        bounds = table.bounds(lanes, layers)
        found: tuple[float, int, Grid] | None = None
        for index in np.argsort(bounds, kind="stable"):
            if found is not None and bounds[index] > found[0] * (1 + 1e-9):
                break
            if not layers[index]:
                continue
            fixed, prices = priced[index]
            value, spent, chosen = partition(
                *table.of(lanes[index]), prices, spare=most - fixed, layers=layers[index]
            )
            if chosen and (found is None or (value, spent + fixed) < found[:2]):
                tokens = tuple(table.sizes[chosen].tolist())
                slots, ranks = pairs[index]
                found = value, spent + fixed, Grid(tokens=tokens, slots=slots, ranks=ranks)
        return None if found is None else self.choice(found[2])

    def choice(self, grid: Grid) -> Choice:
        """A grid with what it needs and costs; its plan is made for that."""
        variants = len(self.replan(grid).variants)
        return Choice(grid=grid, variants=variants, cost=self.cost_of(grid))

    def _lanes(self, slots: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Lanes that a batch may be padded to; 0 where it may be one without adapters."""
        lanes, _ = lane_buckets(slots, ranks, self.quantum)
        return (0, *lanes) if 0 in slots or not lanes else lanes

    def _prices(self, sizes: Ints, pair: Pair) -> tuple[int, Ints]:
        """Variants without tokens, and those of a bucket above each of (none, sizes[0], ...)."""
        below = np.concatenate(([0], sizes[:-1]))
        groups = np.searchsorted(self._edges, below, side="right")
        prices = np.zeros(len(sizes), np.int64)
        fixed = 0
        for group in np.unique(groups):
            at = groups == group
            fixed, prices[at] = self._counted(int(group), int(below[at][0]), int(sizes[-1]), pair)
        return fixed, prices

    def _counted(self, group: int, below: int, last: int, pair: Pair) -> tuple[int, int]:
        slots, ranks = pair
        lanes, adapter_lanes = lane_buckets(slots, ranks, self.quantum)
        # A plan's variants are as many as its buckets make them, whichever these are.
        key = group, last, len(lanes), len(adapter_lanes), int(0 in slots), int(1 in slots)
        if key not in self._variants:
            tokens = tuple(sorted({below, last} - {0}))
            variants = self.replan(Grid(tokens=tokens, slots=slots, ranks=ranks)).variants
            fixed = sum(not variant.tokens for variant in variants)
            self._variants[key] = fixed, sum(variant.tokens == last for variant in variants)
        return self._variants[key]


class _Table:
    """The steps of a search by the sizes that they are padded to."""

    def __init__(self, search: Search, sizes: Iterable[int]) -> None:
        self.sizes = np.asarray(list(sizes), np.int64)
        self._cost, self._within, self._quantum = search.cost, search.within, search.quantum
        where = np.searchsorted(self.sizes, search.mix.tokens)
        self._counts = np.zeros((len(self.sizes), len(search.mix.slots)))
        np.add.at(self._counts, np.minimum(where, len(self.sizes) - 1), search.mix.counts)
        self._costs: dict[int, Floats] = {}
        blocks = np.flatnonzero(np.diff(self._within, axis=1, prepend=0.0).any(axis=0))
        self.own = tuple((blocks * self._quantum).tolist())

    def of(self, lanes: tuple[int, ...]) -> tuple[Floats, Floats]:
        """Weights [n, l] of steps by size and lanes bucket, and costs [l, n] of one at each."""
        edges = np.minimum(np.asarray(lanes) // self._quantum, self._within.shape[1] - 1)
        reached = self._within[:, edges]
        reached[:, -1] = 1.0  # a batch beyond them is refused in a server; here it pays the last
        weights = self._counts @ np.diff(reached, axis=1, prepend=0.0)
        return weights, np.stack([self._at(lane) for lane in lanes])

    def cost(self, lanes: tuple[int, ...]) -> float:
        """Of all steps, each at its size and padded to these lanes."""
        weights, costs = self.of(lanes)
        return float((weights.T * costs).sum())

    def bounds(self, lanes: Sequence[tuple[int, ...]], layers: Sequence[int]) -> Floats:
        """For each choice of lanes: no cut of the sizes into so many buckets costs less.

        Padding tokens costs no less with more lanes, where the cost is such: then what it costs
        without padding of lanes can be added to what these lanes cost without padding of tokens.
        """
        bounds = np.asarray([self.cost(found) for found in lanes])
        every = sorted({*self.own, *(lane for found in lanes for lane in found)})
        costs = np.stack([self._at(lane) for lane in every])
        if (np.diff(np.diff(costs, axis=0), axis=1) < -1e-12 * costs.max()).any():
            return bounds
        own, at_own = self.of(self.own)
        ones, least = np.ones(len(self.sizes), np.int64), self.cost(self.own)
        added = {
            count: partition(own, at_own, ones, spare=count, layers=count)[0] - least
            for count in sorted(set(layers) - {0})
        }
        return bounds + np.asarray([added.get(count, 0.0) for count in layers])

    def _at(self, lanes: int) -> Floats:
        if lanes not in self._costs:
            self._costs[lanes] = np.asarray(self._cost(lanes)(self.sizes), np.float64)
        return self._costs[lanes]


def _layers(fixed: int, prices: Ints, most: int, n: int, count: int | None) -> int:
    """How many token buckets there may be; 0 where not even the last fits."""
    spare = most - fixed
    if spare < int(prices[0]):
        return 0
    cheapest = max(int(prices.min()), 1)
    more = (spare - int(prices[0])) // cheapest
    return min(1 + more, n, n if count is None else count)
