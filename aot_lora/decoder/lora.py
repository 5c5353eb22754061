"""How a step adds adapters: a function it calls at each projection, so that it can be another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from aot_lora.kernels import lora_expand, lora_shrink
from aot_lora.kernels.blocks import Layer

Lora = Callable[[str, jax.Array, jax.Array, Layer], jax.Array]
"""(module, x [T, D], base [T, O], layer) -> base with each row's adapter added, [T, O]."""

LoraMaker = Callable[[dict[str, tuple[jax.Array, jax.Array]], dict[str, Any], jax.Array], Lora]
"""(banks by module, the batch's `blocks` and `owners`, slots [T]) -> the function for such rows."""


def masked_lora(
    banks: dict[str, tuple[jax.Array, jax.Array]], batch: dict[str, Any], slots: jax.Array
) -> Lora:
    """Adapters by the masked kernels of aot-lora.

    Args:
      banks: module -> (A [layers, blocks, quantum, D], B [layers, blocks, quantum, O]).
      batch: ``blocks`` and ``owners``, each [L / quantum] int32.
      slots: [T] int32, each row's slot; -1 for none.

    Returns:
      A function that leaves the modules without banks as they are.
    """
    blocks, owners = batch["blocks"], batch["owners"]

    def add(module: str, x: jax.Array, base: jax.Array, layer: Layer) -> jax.Array:
        if module not in banks:
            return base
        a_bank, b_bank = banks[module]
        h = lora_shrink(x, a_bank, layer, blocks, owners, slots)
        return lora_expand(base, h, b_bank, layer, blocks, slots)

    return add


def no_lora(module: str, x: jax.Array, base: jax.Array, layer: Layer) -> jax.Array:
    """What a batch without adapters adds: nothing."""
    return base
