"""lora_fused as a Pallas TPU kernel: x W and h B meet in VMEM, [T, O] is written once."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.tpu_sizes import fused_sizes, fused_vmem_bytes, refused
from aot_lora.kernels.tpu_stream import Gather, column, gather_scratch, params, result, scalar


def lora_fused(
    x: jax.Array,
    w: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array,
    **sizes: int,
) -> jax.Array:
    """As `xla.lora_fused`.

    Args:
      x, w, h, b_bank, layer, blocks, slots: as there.
      sizes: block_t, block_d, block_o; see `fused_sizes` for those not given.

    Returns:
      [T, O] in the dtype of `x`; the sum is taken in float32.
    """
    return masked_fused(x, w, h, b_bank, layer, blocks, column(slots), **sizes)


def masked_fused(
    x: jax.Array,
    w: jax.Array,
    h: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    blocks: jax.Array,
    slots: jax.Array,
    **sizes: int,
) -> jax.Array:
    """`lora_fused` with slots [T, 1] as in a `Mask`; args as there."""
    (tokens, d), o, (lanes, quantum) = x.shape, w.shape[1], (h.shape[1], b_bank.shape[2])
    itemsize = x.dtype.itemsize
    size = fused_sizes(tokens, lanes, d, o, quantum, itemsize) | sizes
    block_t, block_d, block_o = size["block_t"], size["block_d"], size["block_o"]
    grid = (tokens // block_t, o // block_o, d // block_d)

    return pl.pallas_call(
        partial(_kernel, steps=grid[2]),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec((block_t, block_d), lambda t, i, k, *_: (t, k)),
                pl.BlockSpec((block_d, block_o), lambda t, i, k, *_: (k, i)),
                pl.BlockSpec((block_t, lanes), lambda t, i, k, *_: (t, 0)),
                pl.BlockSpec((block_t, 1), lambda t, i, k, *_: (t, 0)),
            ],
            out_specs=pl.BlockSpec((block_t, block_o), lambda t, i, k, *_: (t, i)),
            scratch_shapes=[
                *gather_scratch(lanes, block_o, b_bank.dtype, places=1),
                pltpu.VMEM((block_t, block_o), jnp.float32),
            ],
        ),
        out_shape=result((tokens, o), x.dtype, x, w, h, b_bank),
        compiler_params=params(fused_vmem_bytes(size, lanes, itemsize), 3),
        name="lora_fused",
    )(scalar(layer), blocks, b_bank, x, w, h, slots)


def supports(
    tokens: int, lanes: int, d: int, o: int, quantum: int, itemsize: int, **sizes: int
) -> str:
    """Why the kernel cannot take these sizes; empty where it can."""
    size = fused_sizes(tokens, lanes, d, o, quantum, itemsize) | sizes
    return refused(
        size,
        fused_vmem_bytes(size, lanes, itemsize),
        ("block_d", d, 128),
        ("block_o", o, 128),
        ("block_t", tokens, 8),
    )


def _kernel(
    layer: Any,
    blocks: Any,
    bank: Any,
    x: Any,
    w: Any,
    h: Any,
    slots: Any,
    out: Any,
    tile: Any,
    semaphores: Any,
    acc: Any,
    *,
    steps: int,
) -> None:
    i, step = pl.program_id(1), pl.program_id(2)
    gather = Gather(bank=bank, layer=layer, blocks=blocks, tile=tile, semaphores=semaphores)

    @pl.when(step == 0)
    def _() -> None:
        gather.start(0, i, 0)  # Comes while x W is computed.

    part = jnp.dot(x[...], w[...], preferred_element_type=jnp.float32)

    @pl.when(step == 0)
    def _() -> None:
        acc[...] = part

    @pl.when(step > 0)
    def _() -> None:
        acc[...] += part

    @pl.when(step == steps - 1)
    def _() -> None:
        gather.wait(0)
        delta = jnp.dot(h[...], tile[0], preferred_element_type=jnp.float32)
        base = acc[...]
        out[...] = jnp.where(slots[...] >= 0, base + delta, base).astype(out.dtype)
