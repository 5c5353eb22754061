"""What is loaded, by point; and where a point has nothing, the next larger one that has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

from aot_lora.errors import OutOfPlanError
from aot_lora.plan import Axis, Module, Plan, Variant
from aot_lora.runtime.misses import Misses


class Kernels(NamedTuple):
    """The two executables that serve a module at a point."""

    module: Module
    shrink: Any
    expand: Any


class Route(NamedTuple):
    """Where a batch goes: its buckets, and the kernels of each module there."""

    tokens: int
    lanes: int
    kernels: dict[str, Kernels]


class Executables:
    """Looks up executables; never changes once made, but for what it has found before.

    Args:
      plan: axes and modules.
      loaded: `jax.stages.Compiled` by variant; all of the plan's unless the policy bears misses.
      misses: told of each point of the plan that has no executable of its own, once, and of
        lengths beyond it.
    """

    def __init__(self, plan: Plan, loaded: Mapping[Variant, Any], misses: Misses) -> None:
        self.plan = plan
        self.loaded = loaded
        self._misses = misses
        self._routes: dict[tuple[int, int, bool], Route] = {}
        self._steps: dict[Variant, tuple[Variant, Any]] = {}

    def step(self, program: str, tokens: int, lanes: int) -> tuple[Variant, Any]:
        """A user program's variant and executable for so many tokens and lanes.

        Raises:
          OutOfPlanError: no such program, or nothing that holds the shape.
        """
        variant = Variant(program, *self._buckets(tokens, lanes, self.plan.lanes))
        executable = self.loaded.get(variant)
        if executable is not None:
            return variant, executable
        found = self._steps.get(variant)
        if found is None:
            found = self._steps[variant] = self._larger_step(variant)
        return found

    def route(self, tokens: int, lanes: int, *, single: bool) -> Route:
        """The buckets and kernels for a batch; without adapters only its token bucket.

        Args:
          tokens: rows.
          lanes: of all of its adapters.
          single: whether every row has the same adapter.

        Raises:
          OutOfPlanError: nothing holds the shape.
        """
        key = (*self._buckets(tokens, lanes, self._axis(single)), single)
        route = self._routes.get(key)
        if route is None:
            route = self._routes[key] = self._find_route(*key)
        return route

    def _buckets(self, tokens: int, lanes: int, axis: Axis) -> tuple[int, int]:
        try:
            return self.plan.tokens.bucket(tokens), axis.bucket(lanes) if lanes else 0
        except OutOfPlanError as error:
            self._misses.beyond("tokens", tokens, error)
            self._misses.beyond("lanes", lanes, error)
            raise

    def _axis(self, single: bool) -> Axis:
        return self.plan.adapter_lanes if single else self.plan.lanes

    def _find_route(self, tokens: int, lanes: int, single: bool) -> Route:
        if not lanes:
            return Route(tokens, 0, {})
        exact = self._kernels(tokens, lanes, single)
        if exact is not None:
            return Route(tokens, lanes, exact)
        if self._misses.planned():
            for larger in self._larger(tokens, lanes, self._axis(single)):
                kernels = self._kernels(*larger, single)
                if kernels is not None:
                    return Route(*larger, kernels)
        raise _nothing_holds("lora", tokens, lanes)

    def _kernels(self, tokens: int, lanes: int, single: bool) -> dict[str, Kernels] | None:
        suffix = "_single" if single else ""
        found: dict[str, Kernels] = {}
        for module in self.plan.modules:
            d, o = self.plan.dims(module, "d"), self.plan.dims(module, "o")
            shrink = self.loaded.get(Variant("lora_shrink" + suffix, tokens, lanes, d))
            expand = self.loaded.get(Variant("lora_expand" + suffix, tokens, lanes, o))
            if shrink is None or expand is None:
                return None
            found[module.name] = Kernels(module, shrink, expand)
        return found

    def _larger_step(self, variant: Variant) -> tuple[Variant, Any]:
        plan = self.plan
        entries = {entry.name: entry for entry in plan.user}
        entry = entries.get(variant.program)
        if entry is None:
            names = sorted(entries)
            raise OutOfPlanError(f"no program `{variant.program}`", expected=f"one of {names}")
        if entry.max_tokens is not None and variant.tokens > entry.max_tokens:
            raise OutOfPlanError(
                f"`{variant.program}` has no executable for {variant.tokens} tokens",
                expected=f"at most {entry.max_tokens}: its max_tokens in the config",
                next_step="raise its max_tokens and run warmup",
            )
        if variant not in plan.variants:
            raise OutOfPlanError(
                f"`{variant.program}` has no executable for {variant.tokens} tokens and "
                f"{variant.lanes} lanes",
                expected="batches without adapters" if variant.lanes else "batches with adapters",
                next_step="list slots above 0" if variant.lanes else "list 0 among lora.slots",
            )
        if self._misses.planned():
            for tokens, lanes in self._larger(variant.tokens, variant.lanes, plan.lanes):
                larger = variant._replace(tokens=tokens, lanes=lanes)
                if larger in self.loaded:
                    return larger, self.loaded[larger]
        raise _nothing_holds(variant.program, variant.tokens, variant.lanes)

    def _larger(self, tokens: int, lanes: int, axis: Axis) -> Iterator[tuple[int, int]]:
        """Points that hold (tokens, lanes), fewest tokens first; no lanes stay no lanes."""
        more_tokens = [bucket for bucket in self.plan.tokens.buckets if bucket >= tokens]
        more_lanes = [bucket for bucket in axis.buckets if bucket >= lanes] if lanes else [0]
        return product(more_tokens, more_lanes)


def _nothing_holds(program: str, tokens: int, lanes: int) -> OutOfPlanError:
    return OutOfPlanError(
        f"`{program}` has no executable that holds {tokens} tokens and {lanes} lanes",
        expected="the store to hold every variant of the plan",
        next_step="run `aot-lora warmup`, and see what it says of the variant",
    )
