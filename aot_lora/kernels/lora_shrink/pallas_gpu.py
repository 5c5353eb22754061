"""Shrinks of projections that read the same rows, on a GPU: one launch for all of them.

Pallas through Triton, which JAX 0.11 deprecates for Mosaic GPU: Mosaic has no tiles of fewer than
64 rows, and a decode step has 16.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
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

    Args:
      rows: [L] int32, where each lane lies in a layer of a bank seen as [blocks * quantum, width];
        those that pad lie in block 0, which is zero.
      owners: [L] int32, the slot that owns each lane.
      slots: [T] int32.
      wanted: [T / GROUP, L / GRANULE] int32, of each group the granules of which a row has a lane,
        first.
      counts: [T / GROUP] int32, how many they are.
      used: [T / GROUP * L / GRANULE] int32, those of all groups side by side, first: each as
        group * (L / GRANULE) + granule.
      total: [1] int32, how many they are.
    """

    rows: jax.Array
    owners: jax.Array
    slots: jax.Array
    wanted: jax.Array
    counts: jax.Array
    used: jax.Array
    total: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Lanes:
    """Once a batch: where its lanes lie, and which rows need which of them."""
    del most
    lanes = batch.blocks.shape[0] * quantum
    padding = (0, -lanes % GRANULE)
    within = jnp.arange(lanes, dtype=jnp.int32) % quantum
    rows = jnp.repeat(batch.blocks * quantum, quantum) + within
    owners = jnp.pad(jnp.repeat(batch.owners, quantum), padding, constant_values=NOBODY)
    slots = jnp.pad(batch.slots, (0, -batch.slots.shape[0] % GROUP), constant_values=-1)
    own = slots.reshape(-1, GROUP)[:, :, None, None] == owners.reshape(-1, GRANULE)[None, None]
    granules = own.any(axis=(1, 3))
    return Lanes(
        rows=jnp.pad(rows, padding),
        owners=owners,
        slots=batch.slots,
        wanted=jax.vmap(order)(~granules),
        counts=granules.sum(axis=1, dtype=jnp.int32),
        used=order(~granules.ravel()),
        total=granules.sum(dtype=jnp.int32).reshape(1),
    )


def order(keys: jax.Array) -> jax.Array:
    """As a stable argsort: [N] int32. By sums, because a sort is many launches."""
    places = jnp.arange(keys.size, dtype=jnp.int32)
    before = (keys < keys[:, None]) | ((keys == keys[:, None]) & (places < places[:, None]))
    taken = before.sum(1) == places[:, None]
    return jnp.where(taken, places, 0).sum(1, dtype=jnp.int32)


def flat(bank: jax.Array) -> jax.Array:
    """A bank as [layers * blocks * quantum, width]."""
    return bank.reshape(-1, bank.shape[-1])


def as_ref(layer: Layer) -> jax.Array:
    """What a kernel reads it from, [1] int32, without a launch to work anything out."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


def multiprocessors() -> int:
    """Streaming multiprocessors of the GPU that is compiled for, or at hand; if none, an H200's.

    A GPU that is compiled for without being there is known from its target config.
    """
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described and described.num_cores:
        return described.num_cores
    device = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132


def lora_shrink(
    x: jax.Array,
    a_banks: tuple[jax.Array, ...],
    layer: Layer,
    lanes: Lanes,
    *,
    block_t: int = 32,
    block_l: int = LEAST,
    block_d: int = 128,
    warps: int = 4,
    stages: int = 4,
    cores: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Projects rows onto the lanes of their own adapters, for several modules at once.

    Args:
      x: [T, D]; T a multiple of `block_t`.
      a_banks: [layers, blocks, quantum, D] of each of M modules.
      layer: int32 scalar, which of the banks' layers.
      lanes: from `prepare`.
      block_t, block_l, block_d: rows, lanes and inputs of a tile; powers of two of at least 16, and
        at most a granule of lanes.
      warps, stages: of Triton.
      cores: as many as `multiprocessors` unless given. Granules are shared out among so many blocks
        of threads that each has about two, or more where tiles of rows are more: one that finds
        nothing to do costs a microsecond too.
      interpret: on the CPU, for tests.

    Returns:
      [M, T, L]; lanes of others are zero. Granules that no row of a group uses are not computed,
      nor loaded, and hold anything.
    """
    tokens, count, cores = x.shape[0], len(a_banks), cores or multiprocessors()
    _, blocks, quantum, _ = a_banks[0].shape
    width = lanes.rows.shape[0]
    tiles, parts = tokens // block_t, GRANULE // block_l
    at_once = min(-(-2 * cores // (tiles * parts * count)), width // GRANULE)
    return pl.pallas_call(
        partial(
            _kernel,
            shape=(block_t, block_l),
            block_d=block_d,
            at_once=at_once,
            per_layer=blocks * quantum,
        ),
        out_shape=jax.ShapeDtypeStruct((count, tokens, width), x.dtype),
        grid=(tiles, at_once * parts, count),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_shrink",
    )(
        as_ref(layer),
        lanes.rows,
        lanes.owners,
        lanes.slots,
        lanes.wanted,
        lanes.counts,
        x,
        *map(flat, a_banks),
    )


def _kernel(
    layer: Any,
    rows: Any,
    owners: Any,
    slots: Any,
    wanted: Any,
    counts: Any,
    x: Any,
    *refs: Any,
    shape: tuple[int, int],
    block_d: int,
    at_once: int,
    per_layer: int,
) -> None:
    *banks, out = refs
    row, place, module = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    parts = GRANULE // shape[1]
    place, part = lax.div(place, parts), lax.rem(place, parts)
    tokens, group = pl.ds(row * shape[0], shape[0]), lax.div(row * shape[0], GROUP)
    slot = slots[tokens]

    def granule(turn: Any, _: None) -> None:
        which = wanted[group, place + turn * at_once]
        lanes = pl.ds(which * GRANULE + part * shape[1], shape[1])
        own, places = slot[:, None] == owners[lanes][None, :], layer[0] * per_layer + rows[lanes]
        used = jnp.max(own.astype(jnp.int32)) > 0

        for index, bank in enumerate(banks):

            @pl.when(used & (module == index))
            def _(index: int = index, bank: Any = bank) -> None:
                h = onto_lanes(
                    lambda columns: x[tokens, columns],
                    bank,
                    places,
                    shape=shape,
                    inputs=(0, x.shape[1]),
                    block_d=block_d,
                )
                out[index, tokens, lanes] = jnp.where(own, h, 0.0).astype(out.dtype)

        @pl.when(~used)
        def _() -> None:
            out[module, tokens, lanes] = jnp.zeros(shape, out.dtype)

    turns = lax.div(counts[group] - place + at_once - 1, at_once)
    lax.fori_loop(0, turns, granule, None)


def onto_lanes(
    load: Callable[[Any], jax.Array],
    bank: Any,
    places: jax.Array,
    *,
    shape: tuple[int, int],
    inputs: tuple[Any, int],
    block_d: int,
) -> jax.Array:
    """Within a kernel: rows onto lanes, whosever they are.

    Args:
      load: rows of x, of inputs as a slice.
      bank: A as [lanes, D]; places: [L] int32, where the lanes lie in it.
      shape: rows and lanes; inputs: the first, and how many.
      block_d: inputs at a time.

    Returns:
      Of that shape, in float32.
    """
    start, depth = inputs

    def step(k: Any, total: jax.Array) -> jax.Array:
        first = start + k * block_d
        a = bank[places[:, None], (first + jnp.arange(block_d, dtype=jnp.int32))[None, :]]
        return total + plgpu.dot(load(pl.ds(first, block_d)), a, trans_b=True)

    return lax.fori_loop(0, depth // block_d, step, jnp.zeros(shape, jnp.float32))
