"""Bank blocks: whole quanta of lanes, the unit in which an adapter owns a bank."""

from __future__ import annotations

import jax
from jax import lax


def gather_lanes(bank: jax.Array, blocks: jax.Array) -> jax.Array:
    """Lays the lanes of `blocks` side by side.

    Args:
      bank: [blocks in the bank, quantum, width].
      blocks: [n] int32, each from 0 up to the bank's last block. Not checked: the host that
        makes them does.

    Returns:
      [n * quantum, width].
    """
    _, quantum, width = bank.shape
    rows = bank.at[blocks].get(mode="promise_in_bounds", wrap_negative_indices=False)
    return rows.reshape(blocks.shape[0] * quantum, width)


def lane_owners(owners: jax.Array, quantum: int) -> jax.Array:
    """The owner of each lane: [n] int32 of blocks to [n * quantum] of lanes."""
    count = owners.shape[0]
    return lax.broadcast_in_dim(owners, (count, quantum), (0,)).reshape(count * quantum)


def bank_write(
    a_bank: jax.Array, b_bank: jax.Array, a: jax.Array, b: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes one adapter's lanes of one module into its blocks, in place.

    Args:
      a_bank: [blocks in the bank, quantum, D]; donate it.
      b_bank: [blocks in the bank, quantum, O]; donate it.
      a: [L, D], zero past the adapter's rank.
      b: [L, O], pre-transposed and scaled, zero past the adapter's rank.
      blocks: [L / quantum] int32, the adapter's blocks; 0 pads, where `a` and `b` are zero.

    Returns:
      The two banks.
    """
    return _put(a_bank, a, blocks), _put(b_bank, b, blocks)


def bank_reset(
    a_bank: jax.Array, b_bank: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Zeroes blocks of both banks, in place; `blocks` as for `bank_write`."""
    lanes = blocks.shape[0] * a_bank.shape[1]
    a = jax.numpy.zeros((lanes, a_bank.shape[2]), a_bank.dtype)
    b = jax.numpy.zeros((lanes, b_bank.shape[2]), b_bank.dtype)
    return bank_write(a_bank, b_bank, a, b, blocks)


def _put(bank: jax.Array, lanes: jax.Array, blocks: jax.Array) -> jax.Array:
    rows = lanes.reshape(blocks.shape[0], bank.shape[1], bank.shape[2])
    return bank.at[blocks].set(rows, mode="promise_in_bounds", wrap_negative_indices=False)
