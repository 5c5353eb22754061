"""lora_shrink in plain XLA: one dense matmul against the lanes of all active adapters."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.blocks import Layer, gather_lanes, lane_owners


def lora_shrink(
    x: jax.Array,
    a_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    owners: jax.Array,
    slots: jax.Array,
) -> jax.Array:
    """Projects each row onto the lanes of its own adapter.

    The lanes of all active adapters lie side by side, whatever their ranks ("laning", vLLM
    PR 15655); a lane of another adapter than the row's gives exactly zero.

    Args:
      x: [T, D] activations.
      a_bank: [layers, blocks, quantum, D] A weights; block 0 is zero.
      layer: int32 scalar, which of the bank's layers.
      blocks: [L / quantum] int32, the bank block behind each block of lanes; 0 pads.
      owners: [L / quantum] int32, the slot that owns each block of lanes.
      slots: [T] int32, each row's slot; -1 for none.

    Returns:
      [T, L] in the dtype of `x`, accumulated in float32.
    """
    a = gather_lanes(a_bank, layer, blocks)
    h = lax.dot_general(x, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    own = slots[:, None] == lane_owners(owners, a_bank.shape[2])[None, :]
    return jnp.where(own, h, jnp.zeros_like(h)).astype(x.dtype)


def lora_shrink_single(
    x: jax.Array, a_bank: jax.Array, layer: Layer, blocks: jax.Array
) -> jax.Array:
    """`lora_shrink` without a mask, for a batch in which every row has the same adapter.

    Args:
      x: [T, D] activations.
      a_bank: [layers, blocks, quantum, D] A weights; block 0 is zero.
      layer: int32 scalar, which of the bank's layers.
      blocks: [L / quantum] int32, the adapter's bank blocks; 0 pads.

    Returns:
      [T, L] in the dtype of `x`, accumulated in float32.
    """
    a = gather_lanes(a_bank, layer, blocks)
    h = lax.dot_general(x, a, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return h.astype(x.dtype)
