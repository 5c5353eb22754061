"""The forms that `kernels_tpu` compares: each adds adapters to base outputs of some modules.

Imported by the child that costs them, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_expand import xla as expand_xla
from aot_lora.kernels.lora_fused import pallas_tpu as fused
from aot_lora.kernels.lora_segments import pallas_tpu as segmented
from aot_lora.kernels.lora_segments.segments import segments
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink
from aot_lora.kernels.lora_shrink import xla as shrink_xla

LAYERS, BANK_LANES = 32, 1024
Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def laned(
    array: Any,
    *,
    tokens: int,
    lanes: int,
    quantum: int,
    d: int,
    o: int,
    modules: int,
    backend: str = "pallas_tpu",
    single: bool = False,
    shrink_sizes: dict[str, int] | None = None,
    expand_sizes: dict[str, int] | None = None,
) -> Made:
    """Shrink and expand, laned; maskless with `single`."""
    first = shrink if backend == "pallas_tpu" else shrink_xla
    second = expand if backend == "pallas_tpu" else expand_xla
    of_a, of_b = dict(shrink_sizes or {}), dict(expand_sizes or {})

    def run(layers: Any, layer: Any, blocks: Any, owners: Any, slots: Any) -> Any:
        def add(base: Any, x: Any, a: Any, b: Any) -> Any:
            if single:
                h = first.lora_shrink_single(x, a, layer, blocks, **of_a)
                return second.lora_expand_single(base, h, b, layer, blocks, **of_b)
            h = first.lora_shrink(x, a, layer, blocks, owners, slots, **of_a)
            return second.lora_expand(base, h, b, layer, blocks, slots, **of_b)

        return [add(*one) for one in layers]

    return run, _arguments(array, tokens, lanes, quantum, d, o, modules), (0,)


def segments_form(
    array: Any,
    *,
    tokens: int,
    lanes: int,
    quantum: int,
    d: int,
    o: int,
    modules: int,
    block_t: int,
    tiles: int,
    sizes: dict[str, int] | None = None,
) -> Made:
    """The segmented pair; a twin that walks `tiles` tiles for each block of tokens."""

    def run(layers: Any, layer: Any, blocks: Any, owners: Any, slots: Any) -> Any:
        batch = segments(blocks, owners, slots, block_t)
        return [
            segmented.static_twin(*one, layer, batch, slots, tiles=tiles, **(sizes or {}))
            for one in layers
        ]

    return run, _arguments(array, tokens, lanes, quantum, d, o, modules), (0,)


def fused(
    array: Any,
    *,
    tokens: int,
    lanes: int,
    quantum: int,
    d: int,
    o: int,
    modules: int,
    shrink_sizes: dict[str, int] | None = None,
    sizes: dict[str, int] | None = None,
) -> Made:
    """Shrink, then the base projection and the expand in one pass; no base output comes in."""

    def run(layers: Any, weights: Any, layer: Any, blocks: Any, owners: Any, slots: Any) -> Any:
        def add(x: Any, a: Any, b: Any, w: Any) -> Any:
            h = shrink.lora_shrink(x, a, layer, blocks, owners, slots, **(shrink_sizes or {}))
            return fused.lora_fused(x, w, h, b, layer, blocks, slots, **(sizes or {}))

        return [add(*one[1:], w) for one, w in zip(layers, weights, strict=True)]

    layers, *rest = _arguments(array, tokens, lanes, quantum, d, o, modules)
    return run, (layers, [array(d, o)] * modules, *rest), ()


def base(array: Any, *, tokens: int, d: int, o: int, modules: int) -> Made:
    """The base projection alone, as XLA compiles it."""

    def run(layers: Any) -> Any:
        return [x @ w for x, w in layers]

    return run, ([(array(tokens, d), array(d, o))] * modules,), ()


def one_hot(
    array: Any, *, tokens: int, adapters: int, rank: int, d: int, o: int, modules: int
) -> Made:
    """vLLM's and tpu-inference's einsum (vLLM PR 15655), dense in adapters, one rank for all.

    Its bank is [X, r, width] of one layer; a slot of -1 gives a row of zeros.
    """

    def run(layers: Any, slots: Any) -> Any:
        hot = jax.nn.one_hot(slots, adapters, dtype=jnp.bfloat16)

        def add(base: Any, x: Any, a: Any, b: Any) -> Any:
            h = jnp.einsum("td,tx,xld->tl", x, hot, a)
            return base + jnp.einsum("tl,tx,xlo->to", h, hot, b)

        return [add(*one) for one in layers]

    arrays = _adapters(array, tokens, adapters, rank, d, o, modules)
    return run, (arrays, array(tokens, dtype=jnp.int32)), (0,)


def ragged(
    array: Any, *, tokens: int, adapters: int, rank: int, d: int, o: int, modules: int
) -> Made:
    """Sort by adapter, `lax.ragged_dot` twice, and back; one rank for all."""

    def run(layers: Any, slots: Any) -> Any:
        order = jnp.argsort(slots)
        back = jnp.argsort(order)
        sizes = jnp.sum(slots[:, None] == jnp.arange(adapters), axis=0, dtype=jnp.int32)

        def add(base: Any, x: Any, a: Any, b: Any) -> Any:
            h = lax.ragged_dot(x[order], a.swapaxes(1, 2), sizes)
            return base + lax.ragged_dot(h, b, sizes)[back]

        return [add(*one) for one in layers]

    arrays = _adapters(array, tokens, adapters, rank, d, o, modules)
    return run, (arrays, array(tokens, dtype=jnp.int32)), (0,)


def _arguments(
    array: Any, tokens: int, lanes: int, quantum: int, d: int, o: int, modules: int
) -> tuple[Any, ...]:
    count, held = lanes // quantum, max(lanes, BANK_LANES) // quantum + 1
    one = (
        array(tokens, o),
        array(tokens, d),
        array(LAYERS, held, quantum, d),
        array(LAYERS, held, quantum, o),
    )
    integers = (array(count, dtype=jnp.int32) for _ in range(2))
    return [one] * modules, array(dtype=jnp.int32), *integers, array(tokens, dtype=jnp.int32)


def _adapters(
    array: Any, tokens: int, adapters: int, rank: int, d: int, o: int, modules: int
) -> list[Any]:
    one = (array(tokens, o), array(tokens, d), array(adapters, rank, d), array(adapters, rank, o))
    return [one] * modules
