"""A batch's adapters as kernels see them, and what is worked out of them once for all layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from aot_lora.kernels.blocks import lane_owners


class Batch(NamedTuple):
    """Which lanes are in a batch, whose they are, and whose each row is.

    Args:
      blocks: [L / quantum] int32, the bank block behind each block of lanes, an adapter's side by
        side; 0, which is zero, pads.
      owners: [L / quantum] int32, the slot that owns each block of lanes; `NOBODY` pads.
      slots: [T] int32, each row's slot; -1 for none.
    """

    blocks: jax.Array
    owners: jax.Array
    slots: jax.Array


def own_lanes(batch: Batch, quantum: int) -> jax.Array:
    """Which lanes are the row's own: [T, L] bool."""
    return batch.slots[:, None] == lane_owners(batch.owners, quantum)[None, :]


def has_adapter(batch: Batch) -> jax.Array:
    """Which rows have an adapter: [T, 1] bool."""
    return batch.slots[:, None] >= 0


def row_blocks(batch: Batch, most: int) -> jax.Array:
    """Each row's bank blocks: [T, most] int32, 0 beyond its adapter's.

    Args:
      batch: the batch.
      most: blocks of the largest adapter there may be.
    """
    own = batch.slots[:, None] == batch.owners[None, :]
    place = jnp.cumsum(own, axis=1) - 1
    wanted = jnp.arange(most)[None, :, None]
    found = own[:, None, :] & (place[:, None, :] == wanted)
    return jnp.sum(jnp.where(found, batch.blocks[None, None, :], 0), axis=-1, dtype=jnp.int32)
