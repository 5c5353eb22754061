"""Times forms of lora_project inside one program, on the device at hand.

A program is a chain of layers, each with weights and adapters of its own, so that nothing but the
rows stays in a cache from one to the next, as in a model's step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.forms import PLAIN, Form
from aot_lora.kernels.reference import tolerance
from aot_lora.kernels.sizes import Sizes

Tuned = tuple[Form, Mapping[str, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A batch to measure with.

    Args:
      tokens: rows T; d: inputs D; o: outputs O of each projection.
      ranks: of the active adapters.
      resident: as many adapters of the first rank stay in the banks beside them.
      layers: of the chain; two at least.
      block: lanes of a block; unless given, the greatest number that divides every rank.
      dtype: of everything.
    """

    tokens: int
    d: int
    o: tuple[int, ...]
    ranks: tuple[int, ...]
    resident: int = 0
    layers: int = 8
    block: int = 0
    dtype: str = "bfloat16"

    @property
    def quantum(self) -> int:
        """Lanes of a block."""
        return self.block or int(np.gcd.reduce(self.ranks))

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
      forms: each form, base included; those that do not serve the point are left out.
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
    point: Point, forms: Mapping[str, Tuned], *, platform: str, rounds: int = 7, ms: float = 10.0
) -> Timed:
    """Checks and times forms at a point; what is worked out once a batch is not timed.

    Args:
      point: what to measure with.
      forms: by label, each with its tuning.
      platform: of the device.
      rounds: of which the median counts; ms: how long each lasts, about.

    Raises:
      ArithmeticError: a form's result is not the plain one's, but for rounding.
    """
    batch, *given = _drawn(point)

    def prepared(form: Form) -> Any:
        prepare = partial(form.prepare, quantum=point.quantum, most=point.sizes.most)
        return jax.jit(prepare)(batch)

    expected = _last(point, partial(_carried, PLAIN, {}), prepared(PLAIN), given)
    chains: dict[str, Callable[[], Any]] = {
        _BASE: partial(_chain(_base), None, *given),
        _TWICE: partial(_chain(_base, times=2), None, *given),
    }
    refused: dict[str, str] = {}
    for label, (form, tuning) in forms.items():
        if reason := form.supports(point.sizes, platform):
            refused[label] = reason
            continue
        project, made = partial(_carried, form, tuning), prepared(form)
        chain = partial(_chain(project), made, *given)
        try:
            _check(label, _last(point, project, made, given), expected, point)
            jax.block_until_ready(chain())
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            refused[label] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            continue
        chains[label] = chain
    times = {
        label: us / point.layers for label, us in _in_turn(chains, rounds=rounds, ms=ms).items()
    }
    base, twice = times.pop(_BASE), times.pop(_TWICE)
    # A chain of bare links is too short to time: the host takes longer to launch it than it runs.
    return Timed(base=base, link=2 * base - twice, forms=times, refused=refused)


_BASE, _TWICE = "", "\0"  # Labels that no form has.


def _in_turn(
    chains: Mapping[str, Callable[[], Any]], *, rounds: int, ms: float
) -> dict[str, float]:
    """Microseconds of one call of each: the median of rounds in which all take their turn.

    A GPU slows down under load: what runs later would look worse.
    """
    calls: dict[str, int] = {}
    for label, chain in chains.items():
        jax.block_until_ready(chain())
        began = time.perf_counter()
        jax.block_until_ready(chain())
        calls[label] = max(2, round(ms * 1e-3 / (time.perf_counter() - began)))
    found: dict[str, list[float]] = {label: [] for label in chains}
    for _ in range(rounds):
        for label, chain in chains.items():
            began = time.perf_counter()
            for _ in range(calls[label] - 1):
                chain()
            jax.block_until_ready(chain())
            found[label].append((time.perf_counter() - began) / calls[label] * 1e6)
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
        for layer in range(point.layers)
    ]
    clear = jax.jit(lambda bank: bank.at[:, 0].set(0), donate_argnums=0)
    banks = tuple(
        tuple(
            clear(normal(7000 + 10 * n + side, (point.layers, blocks, quantum, width)))
            for side, width in enumerate((point.d, o))
        )
        for n, o in enumerate(point.o)
    )
    batch = Batch(
        *jax.device_put((np.arange(1, 1 + sum(counts), dtype=np.int32), owners, slots_of(point)))
    )
    return batch, normal(1, (point.tokens, point.d)), weights, banks


def _chain(project: Callable[..., Any], times: int = 1) -> Any:
    """A jitted chain of layers, each of which does its work so many times.

    It returns its last rows alone: the host makes an array of each result, which took longer than
    the device had work with three small projections a layer.
    """

    def run(prepared: Any, x: Any, weights: Any, banks: Any) -> Any:
        for layer in range(len(weights)):
            found: tuple[Any, ...] = ()
            for turn in range(times):  # with weights that no cache holds any more
                own = weights[(layer + turn * len(weights) // times) % len(weights)]
                # Rows of its own: XLA merges matmuls of the same rows, and copies their weights.
                rows, own = lax.optimization_barrier((x, own))
                more, prepared = project(rows, own, banks, layer, prepared)
                found += more
            found = lax.optimization_barrier(found)  # All of them, not what is read below.
            # Depends on every result, and changes nothing.
            x = x + sum(one[0, 0] for one in found) * jnp.asarray(1e-30, x.dtype)
        return x

    return jax.jit(run)


def _last(point: Point, project: Callable[..., Any], prepared: Any, given: Sequence[Any]) -> Any:
    """What a form makes of the last layer."""

    def run(prepared: Any, x: Any, weights: Any, banks: Any) -> Any:
        return project(x, weights[-1], banks, point.layers - 1, prepared)[0]

    return jax.jit(run)(prepared, *given)


def _check(label: str, found: Any, expected: Any, point: Point) -> None:
    limit = 2 * tolerance(point.dtype, reduction=point.d)
    for one, right in zip(found, expected, strict=True):
        wide = right.astype(jnp.float32)
        error = float(jnp.linalg.norm(one.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))
        if not error <= limit:
            raise ArithmeticError(f"{label} at {point}: off by {error:.2g}, at most {limit:.2g}")
