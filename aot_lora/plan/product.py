"""Buckets of all axes fitted to a trace together, under a limit on variants. Pure; numpy only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from aot_lora.errors import PlanError
from aot_lora.plan.axes import pow2_buckets
from aot_lora.plan.changes import smallest, subsets
from aot_lora.plan.fit import Ints, candidates, check
from aot_lora.plan.grids import Grid, Replan, Search
from aot_lora.plan.mix import LaneCost, Mix, mix_of_steps
from aot_lora.plan.plan import Plan, round_up
from aot_lora.plan.simulate import Steps

_MOST_PAIRS = 20_000  # choices of slots and ranks, each searched by itself
_MOST_RANKS = 10  # distinct ones; every subset of them is tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a fit of all axes may choose from.

    Args:
      plan: as the config has it. Where a trace has no adapters, or their ranks are not known, each
        of its slots or ranks is as likely, and some of them are chosen.
      most: variants of the plan.
      budget: the last token bucket; count: token buckets at most, None for as many as fit.
      multiple, small: of token buckets, as for `fit`.
      slots: buckets of slots above 0 at most.
      ranks: of adapters and how many have each; None where that is not known.
    """

    plan: Plan
    most: int
    budget: int
    count: int | None
    multiple: int
    small: bool
    slots: int
    ranks: tuple[Ints, Ints] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GridUse:
    """A grid and what it costs on a trace, as the cost over that without padding, less one.

    Args:
      name: of the policy; grid: that it makes of the whole trace; variants: of its plan.
      waste: on the whole trace.
      held_out: on every second run of it, if made of the others.
      later: on its later half, if made of the earlier one.
    """

    name: str
    grid: Grid
    variants: int
    waste: float
    held_out: float
    later: float


def fit_grid(
    steps: Steps,
    wanted: Wanted,
    replan: Replan,
    cost: LaneCost,
    *,
    edges: Sequence[int],
    others: Sequence[tuple[str, Grid]] = (),
) -> tuple[GridUse, ...]:
    """The grid that costs the steps of a trace least, behind `others` for comparison.

    Exact for the cost: every choice of slots and ranks is tried, each with the best token buckets
    that `Search.best` finds. Slots are chosen from the numbers of adapters that steps have, ranks
    from those that adapters have, in whole quanta. The most adapters, the largest rank and the
    budget of the config stay, and so does a batch without adapters.

    Args:
      steps: as simulated; wanted: the choice; replan, cost, edges: as for `Search`.
      others: names and grids that hold all steps.

    Raises:
      PlanError: nothing fits, or there is too much to try; it says what would do.
    """
    if len(steps.tokens) < 2:
        raise PlanError(
            "the trace makes a single run of equal steps: none is left to hold out",
            expected="at least 2",
            next_step="record more traffic",
        )
    whole = _searched(steps, wanted, replan, cost, edges)
    found = _fitted(steps, wanted, whole)
    made = [*others, ("fit", found)]
    wastes = {name: [whole.cost_of(grid) / whole.as_is() - 1] for name, grid in made}
    for later in (False, True):
        first, second = steps.halves(later=later)
        held = _searched(second, wanted, replan, cost, edges)
        again = _fitted(first, wanted, _searched(first, wanted, replan, cost, edges), like=steps)
        for name, grid in made:
            used = again if name == "fit" else grid
            wastes[name].append(held.cost_of(used) / held.as_is() - 1)
    return tuple(
        GridUse(
            name=name,
            grid=grid,
            variants=len(replan(grid).variants),
            waste=wastes[name][0],
            held_out=wastes[name][1],
            later=wastes[name][2],
        )
        for name, grid in made
    )


def _searched(
    steps: Steps, wanted: Wanted, replan: Replan, cost: LaneCost, edges: Sequence[int]
) -> Search:
    mix: Mix = mix_of_steps(steps, wanted.plan, ranks=wanted.ranks)
    return Search(mix, replan, cost, quantum=wanted.plan.quantum, edges=edges)


def _fitted(part: Steps, wanted: Wanted, search: Search, *, like: Steps | None = None) -> Grid:
    """The best grid for a part; its slots reach as far as those of `like`."""
    lengths, counts = part.tokens, part.repeats
    asked = 1 if wanted.count is None else wanted.count
    check(lengths, counts, count=asked, multiple=wanted.multiple, budget=wanted.budget)
    sizes, _ = candidates(
        lengths, counts, multiple=wanted.multiple, budget=wanted.budget, small=wanted.small
    )
    slots = slots_that_may_be(part, like or part, wanted)
    ranks = ranks_that_may_be(wanted)
    if len(slots) * len(ranks) > _MOST_PAIRS:
        raise PlanError(
            f"{len(slots):,} choices of slots with {len(ranks):,} of ranks are too many to try",
            expected=f"at most {_MOST_PAIRS:,}",
            found=f"{len(slots) * len(ranks):,}",
            next_step=f"ask for fewer slots buckets than {wanted.slots}",
        )
    pairs = [(s, r) for s in slots for r in ranks]
    found = search.best(sizes.tolist(), pairs, most=wanted.most, count=wanted.count)
    if found is None:
        least = Grid(tokens=(wanted.budget,), slots=slots[0], ranks=ranks[0])
        least = min((least, smallest(least)), key=lambda g: len(search.replan(g).variants))
        raise PlanError(
            f"no grid has at most {wanted.most:,} variants",
            expected=f"at least {len(search.replan(least).variants):,}: those of tokens "
            f"{list(least.tokens)}, slots {list(least.slots)}, ranks {list(least.ranks)}",
            next_step="raise the limit, or use fewer modules or programs",
        )
    return found.grid


def slots_that_may_be(part: Steps, whole: Steps, wanted: Wanted) -> list[tuple[int, ...]]:
    """Choices of slots: up to so many numbers of adapters that steps have, the fewest first.

    A trace without adapters chooses from those of the plan.

    Raises:
      PlanError: steps have more adapters than may be resident, or no buckets are asked for.
    """
    plan = wanted.plan
    if wanted.slots < 1:
        raise PlanError("no slots buckets were asked for", expected="at least 1")
    if part.slots is None or whole.slots is None:
        kept = subsets(plan.slots, kept=frozenset({0}), limit=_MOST_PAIRS)
        few = [slots for slots in kept if sum(slot > 0 for slot in slots) <= wanted.slots]
        return sorted(few, key=len)
    last = max(int(whole.slots.max()), plan.slots[-1])
    if last > plan.max_adapters:
        raise PlanError(
            f"steps of the trace have up to {last} adapters",
            expected=f"at most max_adapters, {plan.max_adapters}",
            next_step=f"raise lora.max_adapters to {last}, or simulate fewer --sequences",
        )
    base = (0,) if 0 in plan.slots or (whole.slots == 0).any() else ()
    free = sorted(set(part.slots.tolist()) - {0, last})
    sizes = range(min(wanted.slots, len(free) + 1))
    if sum(math.comb(len(free), size) for size in sizes) > _MOST_PAIRS:
        raise PlanError(
            f"up to {wanted.slots} of {len(free) + 1} numbers of adapters are too many choices",
            expected=f"at most {_MOST_PAIRS:,} choices",
            next_step="ask for fewer by --slots",
        )
    return [(*base, *chosen, last) for size in sizes for chosen in combinations(free, size)]


def ranks_that_may_be(wanted: Wanted) -> list[tuple[int, ...]]:
    """Choices of ranks: subsets of those that adapters have, in whole quanta, the fewest first.

    Where none are known they are subsets of the plan's.

    Raises:
      PlanError: more of them than can be tried.
    """
    plan = wanted.plan
    quantum = plan.quantum
    axis = plan.ranks
    if wanted.ranks is not None:
        owned = {round_up(int(rank), quantum) for rank in wanted.ranks[0]}
        axis = tuple(sorted({*owned, max(*owned, plan.adapter_lanes.buckets[-1])}))
    if len(axis) > _MOST_RANKS:
        raise PlanError(
            f"adapters of {len(axis)} different ranks are too many to try all bins",
            expected=f"at most {_MOST_RANKS}, in whole quanta of {quantum}",
            next_step="fit the ranks by themselves, by `fit --ranks`, and write them first",
        )
    return sorted(subsets(axis, kept=frozenset(), limit=2**_MOST_RANKS), key=len)


def pow2_grid(wanted: Wanted, *, last: int) -> Grid:
    """Powers of two of tokens and of slots up to `last`, as a peer; ranks as the plan has them."""
    base = (0,) if 0 in wanted.plan.slots else ()
    return Grid(
        tokens=pow2_buckets(smallest=wanted.multiple, budget=wanted.budget),
        slots=(*base, *pow2_buckets(smallest=1, budget=last)),
        ranks=wanted.plan.ranks,
    )
