"""Bank blocks on a TPU: gathered from HBM into one VMEM tile, a chunk ahead of the matmul.

A bank block is as few as 8 lanes, an MXU is 128 or 256 wide: one grid step a block would leave it
idle. So kernels copy the blocks of a batch, and no others, side by side into a tile by themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import ManualAxisType

from aot_lora.kernels.blocks import Layer, lane_owners

Scalar = Any
"""An int32 scalar of a kernel, or a Python integer."""

UNROLLED = 16  # Copies started one by one in the code; more are started in a loop.


@dataclass(frozen=True, slots=True, kw_only=True)
class Gather:
    """Copies from a bank [layers, blocks, quantum, width] in HBM to a tile that has a place or two.

    Args:
      bank: reference to the bank.
      layer: reference to the layer, [1] in SMEM.
      blocks: reference to block numbers, [any] in SMEM.
      tile: reference to [places, lanes, columns] in VMEM; columns divide the bank's width.
      semaphores: references, one for each place.
    """

    bank: Any
    layer: Any
    blocks: Any
    tile: Any
    semaphores: Any

    def start(self, first: Scalar, column: Scalar, place: Scalar) -> None:
        """Begins to copy blocks[first], blocks[first + 1], ... into a place of the tile.

        Args:
          first: where the tile's blocks begin in `blocks`.
          column: the number of the tile's columns among those of the bank.
          place: the tile's first axis.
        """
        quantum = self.bank.shape[2]
        count = self.tile.shape[1] // quantum
        width = self.tile.shape[2]
        columns = pl.ds(column * width, width)

        def copy(index: Scalar) -> None:
            pltpu.make_async_copy(
                self.bank.at[self.layer[0], self.blocks[first + index], :, columns],
                self.tile.at[place, pl.ds(index * quantum, quantum)],
                self.semaphores.at[place],
            ).start()

        if count <= UNROLLED:
            for index in range(count):
                copy(index)
        else:
            lax.fori_loop(0, count, lambda index, _: copy(index), None)

    def wait(self, place: Scalar) -> None:
        """Waits for the place's last `start`. A semaphore counts bytes: one wait serves all."""
        tile = self.tile.at[place]
        pltpu.make_async_copy(tile, tile, self.semaphores.at[place]).wait()


def present(start: Callable[[Scalar, Scalar, Scalar], None], grid: tuple[int, int, int]) -> Scalar:
    """Begins chunk (i, k) one step of the grid ahead; the caller waits, see `fresh`.

    Args:
      start: begins chunk (i, k) in a place.
      grid: (chunks i, token blocks, chunks k), walked in this order.

    Returns:
      The place of this step's chunk.
    """
    outer, tokens, inner = grid
    i, t, k = (pl.program_id(axis) for axis in range(3))
    if inner == 1:  # One chunk serves all token blocks.
        number, last = i, outer - 1
        following = (i + 1, 0)
    else:
        number, last = (i * tokens + t) * inner + k, outer * tokens * inner - 1
        end = k == inner - 1
        following = (
            jnp.where(jnp.logical_and(end, t == tokens - 1), i + 1, i),
            jnp.where(end, 0, k + 1),
        )
    place = lax.bitwise_and(number, 1)

    @pl.when(jnp.logical_and(fresh(grid), number == 0))
    def _() -> None:
        start(0, 0, 0)

    @pl.when(jnp.logical_and(fresh(grid), number < last))
    def _() -> None:
        start(*following, 1 - place)

    return place


def fresh(grid: tuple[int, int, int]) -> Any:
    """Whether this step is the first that uses its chunk."""
    return jnp.logical_or(grid[2] > 1, pl.program_id(1) == 0)


def summed(part: jax.Array, acc: Any, steps: int, finish: Callable[[jax.Array], None]) -> None:
    """Adds up the parts of the grid's last axis, and hands over their sum at its end.

    Args:
      part: this step's, float32.
      acc: reference to as much VMEM; left alone where there is one step.
      steps: of the last axis.
      finish: called with the sum.
    """
    if steps == 1:
        finish(part)
        return
    step = pl.program_id(2)

    @pl.when(step == 0)
    def _() -> None:
        acc[...] = part

    @pl.when(jnp.logical_and(step > 0, step < steps - 1))
    def _() -> None:
        acc[...] += part

    @pl.when(step == steps - 1)
    def _() -> None:
        finish(acc[...] + part)


def gather_scratch(lanes: int, columns: int, dtype: Any, *, places: int = 2) -> list[Any]:
    """Scratch for a `Gather`: its tile and its semaphores."""
    return [pltpu.VMEM((places, lanes, columns), dtype), pltpu.SemaphoreType.DMA((places,))]


def scalar(layer: Layer) -> jax.Array:
    """A layer as [1] int32, to be prefetched."""
    return jnp.asarray(layer, jnp.int32).reshape(1)


class Mask(NamedTuple):
    """Lane owners against token slots, as kernels read them; made once for a batch.

    Args:
      owners: [1, L] int32, the slot that owns each lane: lanes of a block lie on lanes.
      slots: [T, 1] int32, each row's slot: rows of a block lie on sublanes.
    """

    owners: jax.Array
    slots: jax.Array


def mask_of(owners: jax.Array, slots: jax.Array, quantum: int) -> Mask:
    """The mask of a batch's `owners` [L / quantum] and `slots` [T]."""
    return Mask(lane_owners(owners, quantum)[None], column(slots))


def column(values: jax.Array) -> jax.Array:
    """[T] as [T, 1]."""
    return lax.broadcast_in_dim(values, (values.shape[0], 1), (0,))


def result(shape: tuple[int, ...], dtype: Any, *operands: jax.Array) -> jax.ShapeDtypeStruct:
    """What a kernel returns; under `jax.shard_map` it varies as its operands do together."""
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    over = ManualAxisType(varying=frozenset[str]().union(*varying))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=over)


def params(vmem_bytes: int, axes: int) -> pltpu.CompilerParams:
    """Compiler options: chunks are carried from step to step, so no axis may be split."""
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",) * axes,
        vmem_limit_bytes=max(16 << 20, vmem_bytes + (vmem_bytes >> 2) + (2 << 20)),
    )
