"""lora_expand in plain XLA: one dense matmul, added into the base output."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.blocks import Layer, gather_lanes


def lora_expand(
    base: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Adds each row's adapter into the base output.

    Args:
      base: [T, O] output of the base projection; donate it.
      h: [T, L] result of `lora_shrink`.
      b_bank: [layers, blocks, quantum, O] B weights, pre-transposed and scaled; block 0 is
        zero.
      layer: int32 scalar, which of the bank's layers.
      blocks: [L / quantum] int32, as for `lora_shrink`.
      slots: [T] int32, each row's slot; rows of -1 stay bit for bit.

    Returns:
      [T, O] in the dtype of `base`; the sum is taken in float32.
    """
    adapted = lora_expand_single(base, h, b_bank, layer, blocks)
    return jnp.where(slots[:, None] >= 0, adapted, base)


def lora_expand_single(
    base: jax.Array, h: jax.Array, b_bank: jax.Array, layer: Layer, blocks: jax.Array
) -> jax.Array:
    """`lora_expand` without a mask, for a batch in which every row has the same adapter.

    Args and result are those of `lora_expand`, without `slots`.
    """
    b = gather_lanes(b_bank, layer, blocks)
    delta = lax.dot_general(h, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return (base.astype(jnp.float32) + delta).astype(base.dtype)
