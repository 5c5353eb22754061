"""What `kernels_tpu` compares its kernels with, in plain XLA.

Imported by the child that costs them, by name.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels import lora_expand, lora_shrink

LAYERS, BANK_LANES = 32, 1024
Made = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


def laned(array: Any, *, tokens: int, lanes: int, quantum: int, d: int, o: int) -> Made:
    """`lora_shrink` and `lora_expand` in plain XLA, added to a base."""
    count, held = lanes // quantum, max(lanes, BANK_LANES) // quantum + 1
    banks = (array(LAYERS, held, quantum, width) for width in (d, o))
    integers = partial(array, dtype=jnp.int32)

    def run(base: Any, x: Any, a: Any, b: Any, layer: Any, *batch: Any) -> Any:
        blocks, owners, slots = batch
        h = lora_shrink(x, a, layer, blocks, owners, slots)
        return lora_expand(base, h, b, layer, blocks, slots)

    batch = (integers(), integers(count), integers(count), integers(tokens))
    return run, (array(tokens, o), array(tokens, d), *banks, *batch), ()


def base(array: Any, *, tokens: int, d: int, o: int) -> Made:
    """The base projection alone, as XLA compiles it."""
    return lambda x, w: x @ w, (array(tokens, d), array(d, o)), ()


def one_hot(array: Any, *, tokens: int, adapters: int, rank: int, d: int, o: int) -> Made:
    """vLLM's and tpu-inference's einsum (vLLM PR 15655), dense in adapters, one rank for all.

    Its bank is [X, r, width] of one layer; a slot of -1 gives a row of zeros.
    """

    def run(base: Any, x: Any, a: Any, b: Any, slots: Any) -> Any:
        hot = jax.nn.one_hot(slots, adapters, dtype=jnp.bfloat16)
        h = jnp.einsum("td,tx,xld->tl", x, hot, a)
        return base + jnp.einsum("tl,tx,xlo->to", h, hot, b)

    return run, _adapters(array, tokens, adapters, rank, d, o), ()


def ragged(array: Any, *, tokens: int, adapters: int, rank: int, d: int, o: int) -> Made:
    """Sort by adapter, `lax.ragged_dot` twice, and back; one rank for all."""

    def run(base: Any, x: Any, a: Any, b: Any, slots: Any) -> Any:
        order = jnp.argsort(slots)
        back = jnp.argsort(order)
        sizes = jnp.sum(slots[:, None] == jnp.arange(adapters), axis=0, dtype=jnp.int32)
        h = lax.ragged_dot(x[order], a.swapaxes(1, 2), sizes)
        return base + lax.ragged_dot(h, b, sizes)[back]

    return run, _adapters(array, tokens, adapters, rank, d, o), ()


def _adapters(array: Any, tokens: int, adapters: int, rank: int, d: int, o: int) -> Any:
    slots = array(tokens, dtype=jnp.int32)
    banks = array(adapters, rank, d), array(adapters, rank, o)
    return array(tokens, o), array(tokens, d), *banks, slots
