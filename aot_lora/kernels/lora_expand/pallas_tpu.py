"""lora_expand as a Pallas TPU kernel: added into the base output in place."""

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
    expand_sizes,
    lane_unit,
    matmul_vmem_bytes,
    refused,
)
from aot_lora.kernels.tpu_stream import (
    Gather,
    column,
    fresh,
    gather_scratch,
    params,
    present,
    result,
    scalar,
    summed,
)


def lora_expand(
    base: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array,
    **sizes: int,
) -> jax.Array:
    """As `xla.lora_expand`; the result takes the buffer of `base`, so donate it.

    Args:
      base, h, b_bank, layer, blocks, slots: as there.
      sizes: block_t, block_l, block_o; see `expand_sizes` for those not given.

    Returns:
      [T, O] in the dtype of `base`; the sum is taken in float32.
    """
    return masked_expand(base, h, b_bank, layer, blocks, column(slots), **sizes)


def lora_expand_single(
    base: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    **sizes: int,
) -> jax.Array:
    """As `xla.lora_expand_single`: the same kernel without a mask; `sizes` as above."""
    return masked_expand(base, h, b_bank, layer, blocks, None, **sizes)


def supports(tokens: int, lanes: int, o: int, quantum: int, itemsize: int, **sizes: int) -> str:
    """Why the kernel cannot take these sizes; empty where it can."""
    size = expand_sizes(tokens, lanes, o, quantum, itemsize) | sizes
    return refused(
        size,
        _vmem(size, itemsize),
        ("block_o", o, 128),
        ("block_t", tokens, 8),
        ("block_l", lanes, lane_unit(quantum)),
    )


def _vmem(size: dict[str, int], itemsize: int) -> int:
    return matmul_vmem_bytes(
        size["block_t"], size["block_l"], size["block_o"], itemsize, added=True
    )


def masked_expand(
    base: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array | None,
    **sizes: int,
) -> jax.Array:
    """`lora_expand` with slots [T, 1] as in a `Mask`, or without; args as there."""
    (tokens, o), lanes, quantum = base.shape, h.shape[1], b_bank.shape[2]
    size = expand_sizes(tokens, lanes, o, quantum, base.dtype.itemsize) | sizes
    block_t, block_l, block_o = size["block_t"], size["block_l"], size["block_o"]
    grid = (o // block_o, tokens // block_t, lanes // block_l)

    out_spec = pl.BlockSpec((block_t, block_o), lambda i, t, k, *_: (t, i))
    operands: list[Any] = [scalar(layer), blocks, b_bank, h, base]
    in_specs = [
        pl.BlockSpec(memory_space=pltpu.HBM),
        pl.BlockSpec((block_t, block_l), lambda i, t, k, *_: (t, k)),
        out_spec,
    ]
    if slots is not None:
        operands += [slots]
        in_specs += [pl.BlockSpec((block_t, 1), lambda i, t, k, *_: (t, 0))]
    return pl.pallas_call(
        partial(_kernel, grid=grid, masked=slots is not None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=in_specs,
            out_specs=out_spec,
            scratch_shapes=[
                *gather_scratch(block_l, block_o, b_bank.dtype),
                pltpu.VMEM((block_t, block_o), jnp.float32),
            ],
        ),
        out_shape=result(base.shape, base.dtype, base, h, b_bank),
        input_output_aliases={4: 0},
        compiler_params=params(_vmem(size, base.dtype.itemsize), 3),
        name="lora_expand",
    )(*operands)


def _kernel(
    layer: Any, blocks: Any, bank: Any, h: Any, base: Any, *refs: Any, grid: Any, masked: bool
) -> None:
    slots = refs[0] if masked else None
    out, tile, semaphores, acc = refs[-4:]
    gather = Gather(bank=bank, layer=layer, blocks=blocks, tile=tile, semaphores=semaphores)
    count = tile.shape[1] // bank.shape[2]
    place = present(lambda i, k, place: gather.start(k * count, i, place), grid)

    @pl.when(fresh(grid))
    def _() -> None:
        gather.wait(place)

    part = lax.dot_general(
        h[...], tile[place], (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    summed(part, acc, grid[2], partial(add_to_base, out, base, slots))


def add_to_base(out: Any, base: Any, slots: Any, delta: jax.Array) -> None:
    """Writes a block of the result; rows without an adapter are copied, not added to."""
    y = (base[...].astype(jnp.float32) + delta).astype(out.dtype)
    out[...] = y if slots is None else jnp.where(slots[...] >= 0, y, base[...])
