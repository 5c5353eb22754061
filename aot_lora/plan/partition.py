"""An axis cut into buckets that cost least for a price, exactly. Pure; numpy only."""

from __future__ import annotations

import numpy as np

from aot_lora.plan.fit import Floats, Ints

_NEVER = np.inf


def partition(
    weights: Floats, costs: Floats, prices: Ints, *, spare: int, layers: int
) -> tuple[float, int, list[int]]:
    """The sizes that cost least; the last is always among them.

    With c(i, j) the cost of the lengths of sizes i .. j in a bucket of size j, the best cost of the
    first j sizes for u units is

        D[u, j] = min over i of (D[u - price(i), i] + c(i, j))

    Args:
      weights: [n, l] of lengths by size and kind; costs: [l, n] of one of each kind at each size.
      prices: [n] of a bucket above none, above the first size, above the second ...
      spare: units to spend; layers: buckets at most.

    Returns:
      The cost, the units spent and the positions of the sizes; none where even the last is too
      dear.
    """
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
