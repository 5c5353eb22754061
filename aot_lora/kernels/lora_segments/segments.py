"""Which bank blocks each block of tokens needs: once per batch, for all modules and layers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.blocks import NOBODY


class Segments(NamedTuple):
    """What `lora_segments` reads instead of a batch's `blocks` and `owners`.

    Tokens in runs of one adapter need few blocks each; any order is right.

    Args:
      blocks: [T / block_t, n] int32, for each block of tokens the bank blocks of its adapters, in
        the order of the batch; 0 after them.
      owners: [T / block_t, n] int32, the slot that owns each; NOBODY after them.
      length: [T / block_t] int32, how many there are.
    """

    blocks: jax.Array
    owners: jax.Array
    length: jax.Array


def segments(blocks: jax.Array, owners: jax.Array, slots: jax.Array, block_t: int) -> Segments:
    """Lists for each block of tokens the bank blocks that some row of it owns.

    Args:
      blocks: [n] int32, the batch's bank blocks.
      owners: [n] int32, the slot that owns each.
      slots: [T] int32, each row's slot; -1 for none.
      block_t: tokens in a block; a divisor of T.
    """
    of_rows = slots.reshape(-1, block_t, 1)
    needed = jnp.any(of_rows == owners, axis=1)
    length = jnp.sum(needed, axis=1, dtype=jnp.int32)
    order = jnp.argsort(jnp.logical_not(needed), axis=1, stable=True)
    listed = lax.broadcasted_iota(jnp.int32, needed.shape, 1) < length[:, None]
    return Segments(
        blocks=jnp.where(listed, blocks[order], 0),
        owners=jnp.where(listed, owners[order], NOBODY),
        length=length,
    )
