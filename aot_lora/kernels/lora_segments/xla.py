"""lora_segments in plain XLA: what the segments list is gathered, block of tokens by block."""

from __future__ import annotations

import jax

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_expand.xla import lora_expand
from aot_lora.kernels.lora_segments.segments import Segments
from aot_lora.kernels.lora_shrink.xla import lora_shrink


def lora_segments(
    base: jax.Array,
    x: jax.Array,
    a_bank: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    batch: Segments,
    slots: jax.Array,
) -> jax.Array:
    """Adds each row's adapter into the base output, shrink and expand in one.

    Args:
      base: [T, O] output of the base projection; donate it.
      x: [T, D] activations.
      a_bank: [layers, blocks, quantum, D] A weights; block 0 is zero.
      b_bank: [layers, blocks, quantum, O] B weights, pre-transposed and scaled; block 0 is zero.
      layer: int32 scalar, which of the bank's layers.
      batch: of `segments`; its block of tokens is T / its first axis.
      slots: [T] int32, each row's slot; rows of -1 stay bit for bit.

    Returns:
      [T, O] in the dtype of `base`; sums are taken in float32, h is rounded to the dtype of `x`.
    """
    count = batch.length.shape[0]

    def block(base: jax.Array, x: jax.Array, slots: jax.Array, listed: Segments) -> jax.Array:
        h = lora_shrink(x, a_bank, layer, listed.blocks, listed.owners, slots)
        return lora_expand(base, h, b_bank, layer, listed.blocks, slots)

    def split(rows: jax.Array) -> jax.Array:
        return rows.reshape(count, -1, *rows.shape[1:])

    return jax.vmap(block)(split(base), split(x), split(slots), batch).reshape(base.shape)
