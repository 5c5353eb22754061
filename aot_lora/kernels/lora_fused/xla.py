"""lora_fused in plain XLA: two matmuls and one sum in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.blocks import Layer, gather_lanes


def lora_fused(
    x: jax.Array,
    w: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """The base projection with each row's adapter added: x W + h B, rounded once.

    Args:
      x: [T, D] activations.
      w: [D, O] base weights.
      h: [T, L] result of `lora_shrink`.
      b_bank: [layers, blocks, quantum, O] B weights, pre-transposed and scaled; block 0 is zero.
      layer: int32 scalar, which of the bank's layers.
      blocks: [L / quantum] int32, as for `lora_shrink`.
      slots: [T] int32, each row's slot; rows of -1 are x W bit for bit.

    Returns:
      [T, O] in the dtype of `x`; the sum is taken in float32.
    """
    rows = (((1,), (0,)), ((), ()))
    base = lax.dot_general(x, w, rows, preferred_element_type=jnp.float32)
    b = gather_lanes(b_bank, layer, blocks)
    delta = lax.dot_general(h, b, rows, preferred_element_type=jnp.float32)
    return jnp.where(slots[:, None] >= 0, base + delta, base).astype(x.dtype)
