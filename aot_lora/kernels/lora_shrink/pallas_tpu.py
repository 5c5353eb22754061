"""lora_shrink as a Pallas TPU kernel: only the batch's blocks are read from the bank."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.tpu_sizes import (
    lane_unit,
    matmul_vmem_bytes,
    refused,
    shrink_sizes,
)
from aot_lora.kernels.tpu_stream import (
    Gather,
    Mask,
    fresh,
    gather_scratch,
    mask_of,
    params,
    present,
    result,
    scalar,
    summed,
)


def lora_shrink(
    x: jax.Array,
    a_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    owners: jax.Array,
    slots: jax.Array,
    **sizes: int,
) -> jax.Array:
    """As `xla.lora_shrink`: laned, one matmul a tile of lanes, the owners as its mask.

    Args:
      x, a_bank, layer, blocks, owners, slots: as there.
      sizes: block_t, block_l, block_d; see `shrink_sizes` for those not given.

    Returns:
      [T, L] in the dtype of `x`, accumulated in float32.
    """
    mask = mask_of(owners, slots, a_bank.shape[2])
    return masked_shrink(x, a_bank, layer, blocks, mask, **sizes)


def lora_shrink_single(
    x: jax.Array, a_bank: jax.Array, layer: Layer, blocks: jax.Array, **sizes: int
) -> jax.Array:
    """As `xla.lora_shrink_single`: the same kernel without a mask; `sizes` as above."""
    return masked_shrink(x, a_bank, layer, blocks, None, **sizes)


def supports(tokens: int, lanes: int, d: int, quantum: int, itemsize: int, **sizes: int) -> str:
    """Why the kernel cannot take these sizes; empty where it can."""
    size = shrink_sizes(tokens, lanes, d, quantum, itemsize) | sizes
    return refused(
        size,
        _vmem(size, itemsize),
        ("block_d", d, 128),
        ("block_t", tokens, 8),
        ("block_l", lanes, lane_unit(quantum)),
    )


def _vmem(size: dict[str, int], itemsize: int) -> int:
    return matmul_vmem_bytes(
        size["block_t"], size["block_d"], size["block_l"], itemsize, added=False
    )


def masked_shrink(
    x: jax.Array,
    a_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    mask: Mask | None,
    **sizes: int,
) -> jax.Array:
    """`lora_shrink` with a mask made before, or without one; args as there."""
    (tokens, d), quantum = x.shape, a_bank.shape[2]
    lanes = blocks.shape[0] * quantum
    size = shrink_sizes(tokens, lanes, d, quantum, x.dtype.itemsize) | sizes
    block_t, block_l, block_d = size["block_t"], size["block_l"], size["block_d"]
    grid = (lanes // block_l, tokens // block_t, d // block_d)

    operands: list[Any] = [scalar(layer), blocks, a_bank, x]
    in_specs = [
        pl.BlockSpec(memory_space=pltpu.HBM),
        pl.BlockSpec((block_t, block_d), lambda i, t, k, *_: (t, k)),
    ]
    if mask is not None:
        operands += [mask.owners, mask.slots]
        in_specs += [
            pl.BlockSpec((1, block_l), lambda i, t, k, *_: (0, i)),
            pl.BlockSpec((block_t, 1), lambda i, t, k, *_: (t, 0)),
        ]
    return pl.pallas_call(
        partial(_kernel, grid=grid, masked=mask is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=pl.BlockSpec((block_t, block_l), lambda i, t, k, *_: (t, i)),
            scratch_shapes=[
                *gather_scratch(block_l, block_d, a_bank.dtype),
                pltpu.VMEM((block_t, block_l), jnp.float32),
            ],
        ),
        out_shape=result((tokens, lanes), x.dtype, x, a_bank),
        compiler_params=params(_vmem(size, x.dtype.itemsize), 3),
        name="lora_shrink",
    )(*operands)


def _kernel(
    layer: Any, blocks: Any, bank: Any, x: Any, *refs: Any, grid: Any, masked: bool
) -> None:
    owners, slots = refs[:2] if masked else (None, None)
    out, tile, semaphores, acc = refs[-4:]
    gather = Gather(bank=bank, layer=layer, blocks=blocks, tile=tile, semaphores=semaphores)
    count = tile.shape[1] // bank.shape[2]
    place = present(lambda i, k, place: gather.start(i * count, k, place), grid)

    @pl.when(fresh(grid))
    def _() -> None:
        gather.wait(place)

    part = lax.dot_general(
        x[...], tile[place], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    summed(part, acc, grid[2], partial(_finish, out, owners, slots))


def _finish(out: Any, owners: Any, slots: Any, h: jax.Array) -> None:
    """Writes a block of the result; lanes of others become zero, whatever their bank holds."""
    if owners is not None:
        h = jnp.where(slots[...] == owners[...], h, jnp.zeros_like(h))
    out[...] = h.astype(out.dtype)
