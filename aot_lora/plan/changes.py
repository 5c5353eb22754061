"""The cheapest changes of a grid that make its plan small enough. Pure; numpy only."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from aot_lora.plan.grids import Choice, Grid, Search
from aot_lora.plan.plan import round_up

_MOST_PAIRS = 4096  # of slots and ranks; with more of them only one chain of subsets is tried
_MOST_WORK = 10**9  # additions, about a second
_LONG_AXIS = 256  # token buckets: nobody writes more of them out, so a step is offered


def subsets(axis: tuple[int, ...], *, kept: frozenset[int], limit: int) -> list[tuple[int, ...]]:
    """All subsets of an axis that have `kept` and its last bucket, the whole one first.

    Where there are more than `limit`, those that are left by dropping one bucket after the other:
    always the one nearest to the next above it.
    """
    free = [bucket for bucket in axis[:-1] if bucket not in kept]
    if 2 ** len(free) <= limit:
        return [
            tuple(b for b in axis if b not in dropped)
            for size in range(len(free) + 1)
            for dropped in map(set, combinations(free, size))
        ]
    found, left = [axis], list(axis)
    while free:
        near = min(free, key=lambda b: left[left.index(b) + 1] / max(b, 1))
        free.remove(near)
        left.remove(near)
        found.append(tuple(left))
    return found


def smallest(grid: Grid) -> Grid:
    """The budget alone, the most adapters, the largest rank; a batch without adapters stays."""
    slots = tuple(sorted({*(s for s in grid.slots if s == 0), grid.slots[-1]}))
    return Grid(tokens=grid.tokens[-1:], slots=slots, ranks=grid.ranks[-1:])


def changes(grid: Grid, search: Search, *, most: int) -> tuple[Choice, ...]:
    """Grids with buckets of `grid` and at most `most` variants, the least cost first.

    The best of those that drop token buckets alone, slots alone, ranks alone and any of the three.
    The budget, the most adapters and the largest rank stay, and so does a batch without adapters.
    Empty where nothing fits.
    """
    kept: frozenset[int] = frozenset({0})
    slots = subsets(grid.slots, kept=kept, limit=_MOST_PAIRS)
    ranks = subsets(grid.ranks, kept=frozenset(), limit=_MOST_PAIRS)
    limit = max(1, min(_MOST_PAIRS, _MOST_WORK // min(len(grid.tokens), _LONG_AXIS) ** 3))
    if len(slots) * len(ranks) <= limit:
        pairs = [(s, r) for s in slots for r in ranks]
    else:
        chains = (
            subsets(grid.slots, kept=kept, limit=0),
            subsets(grid.ranks, kept=frozenset(), limit=0),
        )
        pairs = [(s, r) for s in chains[0] for r in chains[1]]
        pairs = pairs[:: -(-len(pairs) // limit)] + pairs[-1:]  # the last is the smallest
    now = (grid.slots, grid.ranks)
    found = [
        _fewer_tokens(grid, search, [now], most),
        _fitting(search, most, (Grid(tokens=grid.tokens, slots=s, ranks=now[1]) for s in slots)),
        _fitting(search, most, (Grid(tokens=grid.tokens, slots=now[0], ranks=r) for r in ranks)),
        _fewer_tokens(grid, search, pairs, most),
    ]
    distinct = {choice.grid: choice for choice in found if choice is not None}
    return tuple(sorted(distinct.values(), key=lambda choice: (choice.cost, choice.variants)))


def _fitting(search: Search, most: int, grids: Iterator[Grid]) -> Choice | None:
    fitting = [(search.cost_of(g), search.count(g), g) for g in grids if search.count(g) <= most]
    return search.choice(min(fitting, key=lambda found: found[:2])[2]) if fitting else None


def _fewer_tokens(
    grid: Grid,
    search: Search,
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]],
    most: int,
) -> Choice | None:
    if len(grid.tokens) <= _LONG_AXIS:
        return search.best(grid.tokens, pairs, most=most)
    found = (_stepped(grid, search, pair, most) for pair in pairs)
    return min(filter(None, found), key=lambda choice: choice.cost, default=None)


def _stepped(
    grid: Grid, search: Search, pair: tuple[tuple[int, ...], tuple[int, ...]], most: int
) -> Choice | None:
    """The smallest step that fits, in whole steps of the first bucket."""
    budget, first = grid.tokens[-1], grid.tokens[0]

    def stepped(step: int) -> Grid:
        return Grid(tokens=(*range(step, budget, step), budget), slots=pair[0], ranks=pair[1])

    low, high = 1, -(-budget // first)  # of first buckets
    if search.count(stepped(budget)) > most:
        return None
    while low < high:
        middle = (low + high) // 2
        if search.count(stepped(middle * first)) <= most:
            high = middle
        else:
            low = middle + 1
    return search.choice(stepped(min(round_up(low * first, first), budget)))
