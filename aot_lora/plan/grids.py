"""The grid of token, slots and rank buckets that costs a mix of steps least. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from aot_lora.errors import PlanError
from aot_lora.plan.fit import Floats, Ints
from aot_lora.plan.mix import LaneCost, Mix
from aot_lora.plan.plan import Plan

_MOST_WORK = 2 * 10**10  # additions of the search, some 20 s
_NEVER = np.inf


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


class Search:
    """Looks for grids; remembers what several of them share.

    Args:
      mix: the steps.
      replan: makes a plan of a grid.
      cost: of one step.
      edges: tokens of which programs of a config are called with no more (``max_tokens``).
    """

    def __init__(
        self, mix: Mix, replan: Replan, cost: LaneCost, *, edges: Sequence[int] = ()
    ) -> None:
        self.mix, self.replan, self._cost = mix, replan, cost
        self._edges = np.unique(np.asarray(edges, np.int64))
        self._within: dict[int, Floats] = {}
        self._costs: dict[tuple[int, bytes], Floats] = {}

    def cost_of(self, grid: Grid) -> float:
        """What all steps of the mix cost under a grid."""
        sizes = np.asarray(grid.tokens, np.int64)
        weights, costs = self._table(sizes, grid.slots, grid.ranks)
        return float((weights.T * costs).sum())

    def as_is(self) -> float:
        """What they would cost without padding: every count of tokens and of blocks its own."""
        mix, total = self.mix, 0.0
        quantum = int(np.gcd.reduce(mix.ranks))
        for column, share in enumerate(self._blocks(quantum)):
            for blocks in np.flatnonzero(np.diff(share, prepend=0.0) > 0):
                part = share[blocks] - (share[blocks - 1] if blocks else 0.0)
                costs = np.asarray(self._cost(int(blocks) * quantum)(mix.tokens), np.float64)
                total += float(part * (mix.counts[:, column] @ costs))
        return total

    def best(
        self,
        sizes: Iterable[int],
        pairs: Sequence[tuple[tuple[int, ...], tuple[int, ...]]],
        *,
        most: int,
        count: int | None = None,
    ) -> Choice | None:
        """The grid of the least cost with at most `most` variants; None where there is none.

        Exact: for each of `pairs`, the token buckets by dynamic programming over their variants.
        With S the sizes and c the cost of lengths i .. j in a bucket of S[j], the best cost of the
        first j sizes for u variants is

            D[u, j] = min over i of (D[u - price(i), i] + c(i, j))

        where the price of a bucket depends on the one below it: a program with ``max_tokens`` is
        compiled for each bucket up to the first that holds so many.

        Args:
          sizes: token buckets that may be, rising; the last is always among the chosen.
          pairs: slots and ranks that may be.
          most: variants of the plan.
          count: token buckets at most.

        Raises:
          PlanError: more than can be searched.
        """
        every = np.asarray(list(sizes), np.int64)
        n = len(every)
        priced = [(pair, *self._prices(every, *pair)) for pair in pairs]
        layers = [_layers(fixed, prices, most, n, count) for _, fixed, prices in priced]
        work = n * n * sum(layers)
        if work > _MOST_WORK:
            raise PlanError(
                f"{n:,} token buckets, up to {max(layers):,} of them chosen, with {len(pairs):,} "
                "choices of slots and ranks are too many to search",
                expected=f"at most {_MOST_WORK:,} additions",
                found=f"{work:,}",
                next_step="ask for larger multiples, or for fewer buckets of tokens or slots",
            )
        found: tuple[float, int, Grid] | None = None
        for (pair, fixed, prices), most_buckets in zip(priced, layers, strict=True):
            if not most_buckets:
                continue
            weights, costs = self._table(every, *pair)
            value, spent, chosen = _cheapest(weights, costs, prices, most - fixed, most_buckets)
            if chosen and (found is None or (value, spent + fixed) < found[:2]):
                tokens = tuple(every[chosen].tolist())
                found = value, spent + fixed, Grid(tokens=tokens, slots=pair[0], ranks=pair[1])
        if found is None:
            return None
        return self.choice(found[2])

    def choice(self, grid: Grid) -> Choice:
        """A grid with what it needs and costs; its plan is made for that."""
        variants = len(self.replan(grid).variants)
        return Choice(grid=grid, variants=variants, cost=self.cost_of(grid))

    def _table(
        self, sizes: Ints, slots: tuple[int, ...], ranks: tuple[int, ...]
    ) -> tuple[Floats, Floats]:
        """Weights [n, l] of steps by size and lanes bucket, and costs [l, n] of one at each."""
        mix = self.mix
        plan = self.replan(Grid(tokens=(int(sizes[-1]),), slots=slots, ranks=ranks))
        lanes = [*([0] if 0 in slots or not plan.with_lanes else []),
                 *(plan.lanes.buckets if plan.with_lanes else ())]  # fmt: skip
        within = self._blocks(plan.quantum)
        edges = np.minimum(np.asarray(lanes) // plan.quantum, within.shape[1] - 1)
        reached = within[:, edges]
        reached[:, -1] = 1.0  # a batch beyond them is refused in a server; here it pays the last
        shares = np.diff(reached, axis=1, prepend=0.0)
        where = np.minimum(np.searchsorted(sizes, mix.tokens), len(sizes) - 1)
        weights = np.zeros((len(sizes), len(lanes)))
        np.add.at(weights, where, mix.counts @ shares)
        costs = np.stack([self._costs_of(lane, sizes) for lane in lanes])
        return weights, costs

    def _blocks(self, quantum: int) -> Floats:
        if quantum not in self._within:
            self._within[quantum] = self.mix.within(quantum)
        return self._within[quantum]

    def _costs_of(self, lanes: int, sizes: Ints) -> Floats:
        key = lanes, sizes.tobytes()
        if key not in self._costs:
            self._costs[key] = np.asarray(self._cost(lanes)(sizes), np.float64)
        return self._costs[key]

    def _prices(
        self, sizes: Ints, slots: tuple[int, ...], ranks: tuple[int, ...]
    ) -> tuple[int, Ints]:
        """Variants without tokens, and those of a bucket above each of (none, sizes[0], ...)."""
        below = np.concatenate(([0], sizes[:-1]))
        groups = np.searchsorted(self._edges, below, side="right")
        prices = np.zeros(len(sizes), np.int64)
        fixed = 0
        for group in np.unique(groups):
            at = groups == group
            tokens = tuple(sorted({int(below[at][0]), int(sizes[-1])} - {0}))
            variants = self.replan(Grid(tokens=tokens, slots=slots, ranks=ranks)).variants
            fixed = sum(not variant.tokens for variant in variants)
            prices[at] = sum(variant.tokens == tokens[-1] for variant in variants)
        return fixed, prices


def _layers(fixed: int, prices: Ints, most: int, n: int, count: int | None) -> int:
    """How many token buckets there may be; 0 where not even the last fits."""
    spare = most - fixed
    if spare < int(prices[0]):
        return 0
    cheapest = max(int(prices.min()), 1)
    more = (spare - int(prices[0])) // cheapest
    return min(1 + more, n, n if count is None else count)


def _cheapest(
    weights: Floats, costs: Floats, prices: Ints, spare: int, layers: int
) -> tuple[float, int, list[int]]:
    """Cost, variants spent and positions of the chosen sizes."""
    n = len(prices)
    before = np.concatenate((np.zeros((1, weights.shape[1])), np.cumsum(weights, axis=0)))
    alone = np.einsum("jl,lj->j", before[1:], costs)
    spans = alone[None, :] - before[:-1] @ costs  # [i, j]: lengths i .. j in a bucket of size j
    spans[np.tril_indices(n, -1)] = _NEVER
    groups = [(int(price), np.flatnonzero(prices == price)) for price in np.unique(prices)]
    start = np.full(n + 1, _NEVER)
    start[0] = 0.0
    states: dict[int, Floats] = {0: start}
    came: list[dict[int, tuple[Ints, Ints]]] = []  # by layer and spent: spent before, position i
    best: tuple[float, int, int] | None = None  # cost, spent, layer
    for layer in range(layers):
        new: dict[int, tuple[Floats, Ints, Ints]] = {}
        for spent, value in sorted(states.items()):
            for price, rows in groups:
                if spent + price > spare:
                    continue
                totals = value[rows, None] + spans[rows]
                at = totals.argmin(axis=0)
                least = totals[at, np.arange(n)]
                old = new.get(spent + price)
                if old is None:
                    new[spent + price] = least, np.full(n, spent), rows[at]
                else:
                    less = least < old[0]
                    new[spent + price] = (
                        np.where(less, least, old[0]),
                        np.where(less, spent, old[1]),
                        np.where(less, rows[at], old[2]),
                    )
        came.append({spent: (source, at) for spent, (_, source, at) in new.items()})
        states = {spent: np.append(_NEVER, value) for spent, (value, _, _) in new.items()}
        for spent, value in sorted(states.items()):
            total = float(value[n])
            # A difference that is only one of rounding buys nothing.
            if np.isfinite(total) and (best is None or total < best[0] * (1 - 1e-12)):
                best = total, spent, layer
    if best is None:
        return _NEVER, 0, []
    chosen: list[int] = []
    end, spent = n, best[1]
    for layer in range(best[2], -1, -1):
        source, at = came[layer][spent]
        chosen.append(end - 1)
        spent, end = int(source[end - 1]), int(at[end - 1])
    return best[0], best[1], chosen[::-1]
