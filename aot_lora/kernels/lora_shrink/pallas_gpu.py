"""Shrinks of projections that read the same rows, on a GPU: one launch for all of them.

Pallas through Triton, which JAX 0.11 deprecates for Mosaic GPU: Mosaic has no tiles of fewer than
64 rows, and a decode step has 16.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import NOBODY, Layer

GRANULE = 64
"""Lanes that large matmuls take or leave as one: the K of four tensor core instructions."""

GROUP = 128
"""Rows that they take or leave a granule for: the M of a tile of a large matmul."""

LEAST = 16
"""The fewest rows and lanes of a tile of a shrink: those of a tensor core instruction."""


class Lanes(NamedTuple):
    """What the kernels need of a batch, for all modules and layers; L padded to whole granules.

    Lanes are handled in slices that lie side by side in a bank, W lanes each.

    Args:
      rows: [L] int32, where each lane lies in a layer of a bank seen as [blocks * quantum, width];
        those that pad lie in block 0, which is zero.
      owners: [L] int32, the slot that owns each lane.
      slots: [T] int32.
      used: [T / GROUP, L / W] int32, 1 where a row of the group has a lane of the slice.
      granules: [T / GROUP, L / GRANULE] int32, 1 where it has one of a granule.
      wanted: [T / GROUP, L / GRANULE] int32, of each group the granules that are used, first.
      counts: [T / GROUP] int32, how many they are.
    """

    rows: jax.Array
    owners: jax.Array
    slots: jax.Array
    used: jax.Array
    granules: jax.Array
    wanted: jax.Array
    counts: jax.Array

    @property
    def slice_lanes(self) -> int:
        """Lanes W of a slice."""
        return self.rows.shape[0] // self.used.shape[1]


def prepare(batch: Batch, *, quantum: int, most: int) -> Lanes:
    """Once a batch: where its lanes lie, and which rows need which of them."""
    del most
    lanes = batch.blocks.shape[0] * quantum
    padding = (0, -lanes % GRANULE)
    within = jnp.arange(lanes, dtype=jnp.int32) % quantum
    rows = jnp.repeat(batch.blocks * quantum, quantum) + within
    owners = jnp.pad(jnp.repeat(batch.owners, quantum), padding, constant_values=NOBODY)
    slots = jnp.pad(batch.slots, (0, -batch.slots.shape[0] % GROUP), constant_values=-1)
    width = max(gcd(quantum, GRANULE), LEAST)
    own = slots.reshape(-1, GROUP)[:, :, None, None] == owners.reshape(-1, width)[None, None]
    used = own.any(axis=(1, 3))
    granules = used.reshape(used.shape[0], -1, GRANULE // width).any(axis=2)
    # The granules that are used, first. By sums, because a sort is many launches.
    count = granules.shape[1]
    place = jnp.cumsum(granules, axis=1) - 1
    taken = granules[:, :, None] & (place[:, :, None] == jnp.arange(count))
    wanted = jnp.sum(jnp.where(taken, jnp.arange(count)[None, :, None], 0), axis=1)
    return Lanes(
        rows=jnp.pad(rows, padding),
        owners=owners,
        slots=batch.slots,
        used=used.astype(jnp.int32),
        granules=granules.astype(jnp.int32),
        wanted=wanted.astype(jnp.int32),
        counts=granules.sum(axis=1, dtype=jnp.int32),
    )


def slices(
    banks: tuple[jax.Array, ...], layer: Layer, lanes: Lanes
) -> tuple[jax.Array, list[jax.Array]]:
    """Where slices start [L / W] int32, and each bank as [lanes, width] for that.

    Blocks smaller than a slice are laid side by side first: a copy of the batch's lanes.
    """
    width = lanes.slice_lanes
    layers, blocks, quantum, _ = banks[0].shape
    first = layer * (blocks * quantum)
    flat = [bank.reshape(layers * blocks * quantum, bank.shape[-1]) for bank in banks]
    if quantum % width:
        places = first + lanes.rows
        copies = [bank.at[places].get(mode="promise_in_bounds") for bank in flat]
        return jnp.arange(0, lanes.rows.shape[0], width, dtype=jnp.int32), copies
    return (first + lanes.rows[::width]).astype(jnp.int32), flat


def lora_shrink(
    x: jax.Array,
    a_banks: tuple[jax.Array, ...],
    layer: Layer,
    lanes: Lanes,
    *,
    block_t: int = 64,
    block_d: int = 128,
    splits: int = 1,
    warps: int = 4,
    stages: int = 4,
    interpret: bool = False,
) -> jax.Array:
    """Projects rows onto the lanes of their own adapters, for several modules at once.

    Args:
      x: [T, D]; T a multiple of `block_t`.
      a_banks: [layers, blocks, quantum, D] of each of M modules.
      layer: int32 scalar, which of the banks' layers.
      lanes: from `prepare`.
      block_t, block_d: rows and inputs of a tile; powers of two of at least 16.
      splits: parts into which D is cut, so that few rows still keep the whole GPU busy ("split-K").
      warps, stages: of Triton.
      interpret: on the CPU, for tests.

    Returns:
      [splits, M, T, L], in float32 where they are partial sums; lanes of others are zero.
      Granules that no row of a group uses are not computed, nor loaded, and hold anything.
    """
    tokens, d = x.shape
    width, count = lanes.rows.shape[0], len(a_banks)
    starts, flat = slices(a_banks, layer, lanes)
    return pl.pallas_call(
        partial(_kernel, block_t=block_t, block_d=block_d, depth=d // splits),
        out_shape=jax.ShapeDtypeStruct(
            (splits, count, tokens, width), x.dtype if splits == 1 else jnp.float32
        ),
        grid=(tokens // block_t, len(starts), splits * count),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_shrink",
    )(starts, lanes.owners, lanes.slots, lanes.used, lanes.granules, x, *flat)


def _kernel(
    starts: Any,
    owners: Any,
    slots: Any,
    used: Any,
    granules: Any,
    x: Any,
    *refs: Any,
    block_t: int,
    block_d: int,
    depth: int,
) -> None:
    *banks, out = refs
    width, count = owners.shape[0] // starts.shape[0], len(banks)
    row, lane, part = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    split, module = lax.div(part, count), lax.rem(part, count)
    tokens, group = pl.ds(row * block_t, block_t), lax.div(row * block_t, GROUP)
    columns = pl.ds(lane * width, width)
    wanted = used[group, lane] > 0
    read = granules[group, lax.div(lane * width, GRANULE)] > 0

    for index, bank in enumerate(banks):

        @pl.when(wanted & (module == index))
        def _(index: int = index, bank: Any = bank) -> None:
            lanes = pl.ds(starts[lane], width)

            def step(k: Any, total: jax.Array) -> jax.Array:
                inputs = pl.ds(split * depth + k * block_d, block_d)
                return total + plgpu.dot(x[tokens, inputs], bank[lanes, inputs], trans_b=True)

            zero = jnp.zeros((block_t, width), jnp.float32)
            h = lax.fori_loop(0, depth // block_d, step, zero)
            own = slots[tokens][:, None] == owners[columns][None, :]
            out[split, index, tokens, columns] = jnp.where(own, h, 0.0).astype(out.dtype)

        @pl.when(read & ~wanted & (module == index))
        def _(index: int = index) -> None:
            out[split, index, tokens, columns] = jnp.zeros((block_t, width), out.dtype)
