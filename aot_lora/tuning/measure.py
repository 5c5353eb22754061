"""Times forms of lora_project inside one program, on the device at hand.

A program is a chain of layers, each with weights and adapters of its own, so that nothing but the
rows stays in a cache from one to the next, as in a model's step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

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
      layers: of the chain.
      dtype: of everything.
    """

    tokens: int
    d: int
    o: tuple[int, ...]
    ranks: tuple[int, ...]
    resident: int = 0
    layers: int = 8
    dtype: str = "bfloat16"

    @property
    def quantum(self) -> int:
        """Lanes of a block: the greatest that divides every rank."""
        return int(np.gcd.reduce(self.ranks))

    @property
    def sizes(self) -> Sizes:
        """As forms are asked whether they serve them."""
        return Sizes(
            tokens=self.tokens,
            lanes=sum(self.ranks),
            d=self.d,
            o=self.o,
            quantum=self.quantum,
            most=max(self.ranks) // self.quantum,
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
    point: Point, forms: Mapping[str, Tuned], *, platform: str, rounds: int = 5, calls: int = 4
) -> Timed:
    """Checks and times forms at a point.

    Args:
      point: what to measure with.
      forms: by label, each with its tuning.
      platform: of the device.
      rounds: of which the fastest counts; calls: of the program in each.

    Raises:
      ArithmeticError: a form's result is not the plain one's, but for rounding.
    """
    batch, x, weights, banks = _drawn(point)
    base = _chain(point, lambda x, w, _banks, _layer: tuple(x @ one for one in w), None)
    time_of = partial(
        _time, batch, x, weights, banks, layers=point.layers, rounds=rounds, calls=calls
    )
    expected = _first(point, PLAIN, {}, batch, x, weights, banks)
    times: dict[str, float] = {}
    refused: dict[str, str] = {}
    for label, (form, tuning) in forms.items():
        if reason := form.supports(point.sizes, platform):
            refused[label] = reason
            continue
        try:
            _check(label, _first(point, form, tuning, batch, x, weights, banks), expected, point)
            times[label] = time_of(_chain(point, partial(form.project, **tuning), form))
        except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as error:
            refused[label] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return Timed(
        base=time_of(base), link=time_of(_chain(point, None, None)), forms=times, refused=refused
    )


def _drawn(point: Point) -> Any:
    """A batch, its rows, and weights and banks of each layer, made on the device."""
    quantum = point.quantum
    counts = [rank // quantum for rank in point.ranks]
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


def _chain(point: Point, project: Callable[..., Any] | None, form: Form | None) -> Any:
    """A jitted chain; without `project` the bare links between layers."""

    def run(batch: Batch, x: Any, weights: Any, banks: Any) -> Any:
        prepared = form and form.prepare(batch, quantum=point.quantum, most=point.sizes.most)
        outputs: list[Any] = []
        for layer in range(point.layers):
            own = (banks, layer, prepared) if form else (banks, layer)
            found = project(x, weights[layer], *own) if project else weights[layer]
            outputs.append(found)
            # Depends on every result, and changes nothing.
            x = x + sum(one[0, 0] for one in found) * jnp.asarray(1e-30, x.dtype)
        return outputs if project else x

    return jax.jit(run)


def _first(
    point: Point,
    form: Form,
    tuning: Mapping[str, int],
    batch: Any,
    x: Any,
    weights: Any,
    banks: Any,
) -> Any:
    """What a form makes of the last layer."""

    def run(batch: Batch, x: Any, weights: Any, banks: Any) -> Any:
        prepared = form.prepare(batch, quantum=point.quantum, most=point.sizes.most)
        return form.project(x, weights[-1], banks, point.layers - 1, prepared, **tuning)

    return jax.jit(run)(batch, x, weights, banks)


def _check(label: str, found: Any, expected: Any, point: Point) -> None:
    limit = 2 * tolerance(point.dtype, reduction=point.d)
    for one, right in zip(found, expected, strict=True):
        wide = right.astype(jnp.float32)
        error = float(jnp.linalg.norm(one.astype(jnp.float32) - wide) / jnp.linalg.norm(wide))
        if not error <= limit:
            raise ArithmeticError(f"{label} at {point}: off by {error:.2g}, at most {limit:.2g}")


def _time(
    batch: Any, x: Any, weights: Any, banks: Any, run: Any, *, layers: int, rounds: int, calls: int
) -> float:
    jax.block_until_ready(run(batch, x, weights, banks))
    found: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        results: Sequence[Any] = [run(batch, x, weights, banks) for _ in range(calls)]
        jax.block_until_ready(results)
        found.append((time.perf_counter() - began) / calls / layers * 1e6)
    return min(found)
