"""Bank blocks: whole quanta of lanes, the unit in which an adapter owns a bank."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.plan.pad import NOBODY

__all__ = [
    "NOBODY",
    "Layer",
    "bank_reset",
    "bank_write",
    "gather_lanes",
    "lane_owners",
    "put_bits",
    "put_each",
]

Layer = jax.Array | int


def gather_lanes(bank: jax.Array, layer: Layer, blocks: jax.Array) -> jax.Array:
    """Lays the lanes of a layer's `blocks` side by side.

    Args:
      bank: [layers, blocks, quantum, width].
      layer: int32 scalar, traced as in a scan over layers, or a Python integer.
      blocks: [n] int32, each from 0 up to the bank's last block. Not checked: the host that
        makes them does.

    Returns:
      [n * quantum, width].
    """
    layers, count, quantum, width = bank.shape
    flat = bank.reshape(layers * count, quantum, width)  # no copy: one index instead of two
    rows = flat.at[layer * count + blocks].get(
        mode="promise_in_bounds", wrap_negative_indices=False
    )
    return rows.reshape(blocks.shape[0] * quantum, width)


def lane_owners(owners: jax.Array, quantum: int) -> jax.Array:
    """The owner of each lane: [n] int32 of blocks to [n * quantum] of lanes."""
    count = owners.shape[0]
    return lax.broadcast_in_dim(owners, (count, quantum), (0,)).reshape(count * quantum)


def bank_write(
    a_bank: jax.Array,
    b_bank: jax.Array,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    blocks: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes one adapter's lanes of one module, all layers, into its blocks, in place.

    B comes as files hold it and is scaled and transposed here, once, so that the host only reads
    and copies ("pre-transposed B", vLLM PR 15655).

    Args:
      a_bank: [layers, blocks, quantum, D]; donate it.
      b_bank: [layers, blocks, quantum, O]; donate it.
      a: [layers, L, D], zero past the adapter's rank.
      b: [layers, O, L], zero past the adapter's rank.
      scale: [layers] float32, alpha / r of each layer.
      blocks: [L / quantum] int32, the adapter's blocks; 0 pads, where `a` and `b` are zero.

    Returns:
      The two banks.
    """
    scaled = b.astype(jnp.float32) * scale[:, None, None]
    b = scaled.astype(b_bank.dtype).swapaxes(1, 2)
    return _put(a_bank, a, blocks), _put(b_bank, b, blocks)


def bank_reset(
    a_bank: jax.Array, b_bank: jax.Array, blocks: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Zeroes blocks of both banks, in place; `blocks` as for `bank_write`."""
    lanes = blocks.shape[0] * a_bank.shape[2]
    a, b = (
        jnp.zeros((bank.shape[0], lanes, bank.shape[3]), bank.dtype) for bank in (a_bank, b_bank)
    )
    return _put(a_bank, a, blocks), _put(b_bank, b, blocks)


def _put(bank: jax.Array, lanes: jax.Array, blocks: jax.Array) -> jax.Array:
    """Writes `lanes` [layers, L, width] into a bank's blocks, in place.

    XLA's CPU compiler widens a bank of two-byte floats to float32 and back (100 times as long), so
    there it moves bits; on a TPU the same bits cost a copy of the bank.
    """
    return lax.platform_dependent(bank, lanes, blocks, cpu=put_bits, default=put_each)


def put_each(bank: jax.Array, lanes: jax.Array, blocks: jax.Array) -> jax.Array:
    """One update for each block. A scatter took 6 times as long on a CPU."""
    quantum = bank.shape[2]
    for index in range(blocks.shape[0]):
        row = lanes[:, None, index * quantum : (index + 1) * quantum]
        bank = lax.dynamic_update_slice(bank, row, (0, blocks[index], 0, 0))
    return bank


def put_bits(bank: jax.Array, lanes: jax.Array, blocks: jax.Array) -> jax.Array:
    """`put_each` on the bits of the floats."""
    bits = jnp.uint16 if bank.dtype.itemsize == 2 else jnp.uint32
    moved = put_each(
        lax.bitcast_convert_type(bank, bits), lax.bitcast_convert_type(lanes, bits), blocks
    )
    return lax.bitcast_convert_type(moved, bank.dtype)
