"""Times forms of lora_project inside one program, on the device at hand.

A program is a chain of layers, each with weights and adapters of its own, so that nothing but the
rows stays in a cache from one to the next, as in a model's step.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.forms import PLAIN, Form
from aot_lora.kernels.reference import tolerance
from aot_lora.kernels.sizes import Sizes

Tuned = tuple[Form, Mapping[str, int]]

_UNCACHED = 2**27
"""Bytes of which a cache holds little when they are read again: twice an H200's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch to measure with.

    Args:
      tokens: rows T; d: inputs D; o: outputs O of each projection.
      ranks: of the active adapters.
      resident: as many adapters of the first rank stay in the banks beside them.
      layers: of the chain; unless given, as many as no cache holds the weights of, 2 to 8.
      block: lanes of a block; unless given, the greatest number that divides every rank.
      dtype: of everything.
    """

    tokens: int
    d: int
    o: tuple[int, ...]
    ranks: tuple[int, ...]
    resident: int = 0
    layers: int = 0
    block: int = 0
    dtype: str = "bfloat16"

    @property
    def quantum(self) -> int:
        """Lanes of a block."""
        return self.block or int(np.gcd.reduce(self.ranks))

    @property
    def depth(self) -> int:
        """Layers of the chain."""
        weights = self.d * sum(self.o) * jnp.dtype(self.dtype).itemsize
        return self.layers or min(max(2, -(-_UNCACHED // weights)), 8)

    @property
    def turns(self) -> int:
        """How often a program goes through its layers."""
        return -(-32 // self.depth) if self.tokens <= 512 else 4

    @property
    def counts(self) -> list[int]:
        """Blocks of each adapter."""
        return [-(-rank // self.quantum) for rank in self.ranks]

    @property
    def sizes(self) -> Sizes:
        """As forms are asked whether they serve them."""
        return Sizes(
            tokens=self.tokens,
            lanes=sum(self.counts) * self.quantum,
            d=self.d,
            o=self.o,
            quantum=self.quantum,
            most=max(self.counts),
            dtype=self.dtype,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """Microseconds of one layer of the chain.

    Args:
      base: the projections alone; link: what only ties the layers together, in each of the others.
      forms: each form, base included; those that do not serve the point are left out. And what
        took its turn with them.
      refused: form -> why it was left out.
    """

    base: float
    link: float
    forms: dict[str, float]
    refused: dict[str, str]


def slots_of(point: Point) -> np.ndarray:
    """Rows at random for decode, in runs as prompts are for more: [T] int32."""
    rng = np.random.default_rng(0)
    count = len(point.ranks)
    if point.tokens <= 128:
        return rng.integers(0, count, point.tokens).astype(np.int32)
    cuts = np.sort(rng.choice(np.arange(1, point.tokens), count - 1, replace=False))
    return np.searchsorted(cuts, np.arange(point.tokens), side="right").astype(np.int32)


def measure(
    point: Point,
    forms: Mapping[str, Tuned],
    *,
    platform: str,
    others: Mapping[str, Chain] | None = None,
    rounds: int = 5,
    ms: float = 10.0,
) -> Timed:
    """Checks and times forms at a point; what is worked out once a batch is not timed.

    Args:
      point: what to measure with.
      forms: by label, each with its tuning.
      platform: of the device.
      others: by label what takes its turn with the forms; a call does `Chain.layers` layers.
      rounds: of which the median counts; ms: how long each lasts, about, settled before.

    Raises:
      ArithmeticError: a form's result is not the plain one's, but for rounding.
    """
    batch, *given = _drawn(point)

    def prepared(form: Form) -> Any:
        prepare = partial(form.prepare, quantum=point.quantum, most=point.sizes.most)
        return jax.jit(prepare)(batch)

    def made(form: Form, tuning: Mapping[str, int]) -> Chain:
        project = jax.jit(partial(_carried, form, tuning))  # JAX lowers it once for all layers.
        args = prepared(form), *given
        chain = jax.jit(partial(_chain, project, point.turns)).lower(*args).compile()
        return Chain(partial(chain, *args), point.turns * point.depth)

    x, weights, banks = given
    last = point.depth - 1
    expected = jax.jit(PLAIN.project)(x, weights[last], banks, last, prepared(PLAIN))
    chains = {
        _BASE: Chain(partial(_base_chain(point.turns), None, *given), point.turns * point.depth),
        _LINK: Chain(partial(_links, x), _LINKS),
    }
    refused: dict[str, str] = {}
    served: dict[str, Tuned] = {}
    for label, (form, tuning) in forms.items():
        if reason := form.supports(point.sizes, platform):
            refused[label] = reason
        else:
            served[label] = form, tuning
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = {
            label: pool.submit(made, *tuned) for label, tuned in served.items() if tuned[0].tunings
        }
        for label, tuned in served.items():
            try:
                # XLA tries matmuls on the device, so those of its own forms one after the other.
                chain = kernels[label].result() if label in kernels else made(*tuned)
                _check(label, chain.run(), expected, point)
            except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
                refused[label] = f"{type(error).__name__}: {str(error).strip()[:200]}"
                continue
            chains[label] = chain
    times = _in_turn({**chains, **(others or {})}, rounds=rounds, ms=ms)
    base, link = times.pop(_BASE), times.pop(_LINK)
    return Timed(base=base, link=link, forms=times, refused=refused)


_BASE, _LINK = "", "\0"  # Labels that no form has.
_LINKS, _SETTLED = 64, 3


class Chain(NamedTuple):
    """What is timed: a call, without waiting for it, and how many layers that does."""

    run: Callable[[], Any]
    layers: int


def _in_turn(chains: Mapping[str, Chain], *, rounds: int, ms: float) -> dict[str, float]:
    """Microseconds of one layer of each: the median of rounds in which all take their turn.

    Large matmuls reach a GPU's power limit, and slow down by a sixth within some 50 ms; what waits
    for memory lets it recover, and one that idles is slow at first. So that nothing is timed in the
    state that another left, each goes on `_SETTLED` times as long before its turn counts.
    """
    calls: dict[str, int] = {}
    for label, chain in chains.items():
        jax.block_until_ready(chain.run())
        began = time.perf_counter()
        jax.block_until_ready(chain.run())
        calls[label] = max(2, round(ms * 1e-3 / (time.perf_counter() - began)))
    found: dict[str, list[float]] = {label: [] for label in chains}
    for _ in range(rounds):
        for label, (run, layers) in chains.items():
            for count in (_SETTLED * calls[label], calls[label]):
                began = time.perf_counter()
                for _ in range(count - 1):
                    run()
                jax.block_until_ready(run())
            found[label].append((time.perf_counter() - began) / calls[label] / layers * 1e6)
    return {label: statistics.median(times) for label, times in found.items()}


def _base(x: Any, weights: Any, banks: Any, layer: int, prepared: Any) -> tuple[Any, Any]:
    del banks, layer
    return tuple(x @ weight for weight in weights), prepared


def _carried(form: Form, tuning: Mapping[str, int], *args: Any) -> tuple[Any, Any]:
    """Outputs, and what the next layer takes for `prepared`."""
    return form.divided(form.project(*args, **tuning), args[-1])


def _drawn(point: Point) -> Any:
    """A batch, its rows, and weights and banks of each layer, made on the device."""
    quantum = point.quantum
    counts = point.counts
    blocks = 1 + sum(counts) + point.resident * counts[0]
    owners = np.repeat(np.arange(len(counts)), counts).astype(np.int32)

    @partial(jax.jit, static_argnums=(1,))
    def normal(seed: Any, shape: tuple[int, ...]) -> Any:
        drawn = jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)
        return (drawn * shape[-1] ** -0.5).astype(point.dtype)

    weights = [
        tuple(normal(100 * layer + n, (point.d, o)) for n, o in enumerate(point.o))
        for layer in range(point.depth)
    ]
    clear = jax.jit(lambda bank: bank.at[:, 0].set(0), donate_argnums=0)
    banks = tuple(
        tuple(
            clear(normal(7000 + 10 * n + side, (point.depth, blocks, quantum, width)))
            for side, width in enumerate((point.d, o))
        )
        for n, o in enumerate(point.o)
    )
    batch = Batch(
        *jax.device_put((np.arange(1, 1 + sum(counts), dtype=np.int32), owners, slots_of(point)))
    )
    return batch, normal(1, (point.tokens, point.d)), weights, banks


def _chain(
    project: Callable[..., Any], turns: int, prepared: Any, x: Any, weights: Any, banks: Any
) -> Any:
    """What the last layer makes of all, run so many times over.

    All in one program: a host launches a short one more slowly than a GPU runs it.
    """

    def turn(_: Any, carried: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        x, prepared, found = carried
        for layer, own in enumerate(weights):
            # Work that each layer does again: XLA merges matmuls of the same rows, and moves what
            # does not change out of the loop.
            rows, own, prepared = lax.optimization_barrier((x, own, prepared))
            found, prepared = project(rows, own, banks, layer, prepared)
            found = lax.optimization_barrier(found)  # All of them, not what is read below.
            x = _linked(x, found)
        return x, prepared, found

    outputs = tuple(jnp.zeros((x.shape[0], own.shape[1]), x.dtype) for own in weights[-1])
    return lax.fori_loop(0, turns, turn, (x, prepared, outputs))[2]


@cache
def _base_chain(turns: int) -> Any:
    """The projections alone; one function for all points, so that JAX knows those it compiled."""
    return jax.jit(partial(_chain, _base, turns))


@jax.jit
def _links(x: Any) -> Any:
    """What only ties layers together, of so many that the host is not what takes long."""
    for _ in range(_LINKS):
        x = _linked(x, lax.optimization_barrier((x,)))
    return x


def _linked(x: Any, found: Any) -> Any:
    """Depends on every result, and changes nothing: one number is written where it was."""
    same = x[:1, :1] + sum(one[0, 0] for one in found) * jnp.asarray(1e-30, x.dtype)
    return lax.dynamic_update_slice(x, same, (0, 0))


def _check(label: str, found: Any, expected: Any, point: Point) -> None:
    limit = 2 * tolerance(point.dtype, reduction=point.d)
    for one, right in zip(found, expected, strict=True):
        wide = right.astype(jnp.float32)
        error = float(jnp.linalg.norm(one.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))
        if not error <= limit:
            raise ArithmeticError(f"{label} at {point}: off by {error:.2g}, at most {limit:.2g}")
