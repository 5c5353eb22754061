"""lora_segments as a Pallas TPU kernel: blocks of absent adapters are not even read.

Skipping the matmul of an absent adapter alone saves no HBM traffic (vLLM PR 15655). Here each
block of tokens has its own list of bank blocks, and walks no further than it is long.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from aot_lora.kernels.blocks import Layer, lane_owners
from aot_lora.kernels.lora_expand.pallas_tpu import add_to_base
from aot_lora.kernels.lora_segments.segments import Segments
from aot_lora.kernels.tpu_sizes import (
    lane_unit,
    refused,
    segments_sizes,
    segments_vmem_bytes,
)
from aot_lora.kernels.tpu_stream import Gather, column, gather_scratch, params, result, scalar


def lora_segments(
    base: jax.Array,
    x: jax.Array,
    a_bank: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    batch: Segments,
    slots: jax.Array,
    **sizes: int,
) -> jax.Array:
    """As `xla.lora_segments`; the result takes the buffer of `base`, so donate it.

    Args:
      base, x, a_bank, b_bank, layer, batch, slots: as there.
      sizes: block_l, block_o; see `segments_sizes` for those not given. `batch` has block_t.

    Returns:
      [T, O] in the dtype of `base`; sums are taken in float32.
    """
    lanes = listed_lanes(batch, a_bank.shape[2])
    return masked_segments(base, x, a_bank, b_bank, layer, batch, lanes, column(slots), **sizes)


def listed_lanes(batch: Segments, quantum: int) -> jax.Array:
    """The owner of each lane of each block of tokens: [T / block_t, L]; once for a batch."""
    return jax.vmap(partial(lane_owners, quantum=quantum))(batch.owners)


def static_twin(*args: Any, tiles: int, **sizes: int) -> jax.Array:
    """`masked_segments` that walks `tiles` tiles in each block of tokens, to be costed, not run.

    The compiler's static profile takes scalars as 0 and would count no tile at all.
    """
    return masked_segments(*args, tiles=tiles, **sizes)


def supports(
    tokens: int, lanes: int, d: int, o: int, quantum: int, itemsize: int, **sizes: int
) -> str:
    """Why the kernel cannot take these sizes; empty where it can."""
    size = segments_sizes(tokens, lanes, d, o, quantum, itemsize) | sizes
    return refused(
        size,
        segments_vmem_bytes(size, lanes, d, itemsize),
        ("block_o", o, 128),
        ("block_t", tokens, 8),
        ("block_l", lanes, lane_unit(quantum)),
    )


def masked_segments(
    base: jax.Array,
    x: jax.Array,
    a_bank: jax.Array,
    b_bank: jax.Array,
    layer: Layer,
    batch: Segments,
    owners: jax.Array,
    slots: jax.Array,
    *,
    tiles: int | None = None,
    **sizes: int,
) -> jax.Array:
    """`lora_segments` with `listed_lanes` and slots [T, 1] made before; args as there."""
    (tokens, o), d, quantum = base.shape, x.shape[1], a_bank.shape[2]
    token_blocks, listed = batch.blocks.shape
    lanes, block_t, itemsize = listed * quantum, tokens // token_blocks, x.dtype.itemsize
    size = segments_sizes(tokens, lanes, d, o, quantum, itemsize) | sizes | {"block_t": block_t}
    block_l, block_o = size["block_l"], size["block_o"]
    in_tile, grid = block_l // quantum, (token_blocks, o // block_o)

    out_spec = pl.BlockSpec((block_t, block_o), lambda t, i, *_: (t, i))
    return pl.pallas_call(
        partial(_kernel, grid=grid, listed=listed, in_tile=in_tile, tiles=tiles),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=grid,
            in_specs=[
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec(memory_space=pltpu.HBM),
                pl.BlockSpec((block_t, d), lambda t, i, *_: (t, 0)),
                pl.BlockSpec((None, lanes // block_l, 1, block_l), lambda t, i, *_: (t, 0, 0, 0)),
                pl.BlockSpec((block_t, 1), lambda t, i, *_: (t, 0)),
                out_spec,
            ],
            out_specs=out_spec,
            scratch_shapes=[
                *gather_scratch(block_l, d, a_bank.dtype),
                *gather_scratch(block_l, block_o, b_bank.dtype),
                pltpu.VMEM((lanes // block_l, block_t, block_l), x.dtype),
                pltpu.VMEM((block_t, block_o), jnp.float32),
            ],
        ),
        out_shape=result(base.shape, base.dtype, base, x, a_bank, b_bank),
        input_output_aliases={8: 0},
        compiler_params=params(segments_vmem_bytes(size, lanes, d, itemsize), 2),
        name="lora_segments",
    )(
        scalar(layer),
        batch.blocks.reshape(-1),
        lax.div(batch.length + (in_tile - 1), jnp.int32(in_tile)),
        a_bank,
        b_bank,
        x,
        owners.reshape(token_blocks, -1, 1, block_l),
        slots,
        base,
    )


def _kernel(
    layer: Any,
    blocks: Any,
    tiles_of: Any,
    a_bank: Any,
    b_bank: Any,
    x: Any,
    owners: Any,
    slots: Any,
    base: Any,
    out: Any,
    a_tile: Any,
    a_semaphores: Any,
    b_tile: Any,
    b_semaphores: Any,
    h: Any,
    acc: Any,
    *,
    grid: tuple[int, int],
    listed: int,
    in_tile: int,
    tiles: int | None,
) -> None:
    t, i = pl.program_id(0), pl.program_id(1)
    of = partial(Gather, layer=layer, blocks=blocks)
    a = of(bank=a_bank, tile=a_tile, semaphores=a_semaphores)
    b = of(bank=b_bank, tile=b_tile, semaphores=b_semaphores)

    def tiles_at(t: Any) -> Any:
        return tiles_of[t] if tiles is None else tiles

    def first(t: Any, tile: Any) -> Any:
        return t * listed + tile * in_tile

    count = tiles_at(t)

    @pl.when(i == 0)
    def _() -> None:
        @pl.when(jnp.logical_and(t == 0, count > 0))
        def _() -> None:
            a.start(first(0, 0), 0, 0)

        @pl.when(count > 0)
        def _() -> None:
            b.start(first(t, 0), 0, 0)

        def shrink(tile: Any, _: Any) -> None:
            place = lax.bitwise_and(tile, 1)

            @pl.when(tile + 1 < count)
            def _() -> None:
                a.start(first(t, tile + 1), 0, 1 - place)

            a.wait(place)
            part = lax.dot_general(
                x[...], a_tile[place], (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
            )
            own = slots[...] == owners[tile]
            h[tile] = jnp.where(own, part, jnp.zeros_like(part)).astype(h.dtype)

        lax.fori_loop(0, count, shrink, None)

    # The next tokens' A comes while this one's last columns are computed.
    following = jnp.minimum(t + 1, grid[0] - 1)

    @pl.when((i == grid[1] - 1) & (t < grid[0] - 1) & (tiles_at(following) > 0))
    def _() -> None:
        a.start(first(following, 0), 0, 0)

    def delta(tile: Any) -> jax.Array:
        place = lax.bitwise_and(i * count + tile, 1)
        end = tile + 1 == count

        @pl.when(jnp.logical_not(end & (i == grid[1] - 1)))
        def _() -> None:
            b.start(first(t, jnp.where(end, 0, tile + 1)), jnp.where(end, i + 1, i), 1 - place)

        b.wait(place)
        return jnp.dot(h[tile], b_tile[place], preferred_element_type=jnp.float32)

    finish = partial(add_to_base, out, base, slots)

    @pl.when(count == 0)
    def _() -> None:
        out[...] = base[...]

    @pl.when(count == 1)  # Most blocks of tokens in runs: the sum need not be kept.
    def _() -> None:
        finish(delta(0))

    @pl.when(count > 1)
    def _() -> None:
        acc[...] = delta(0)

        def add(tile: Any, _: Any) -> None:
            acc[...] += delta(tile)

        lax.fori_loop(1, count - 1, add, None)
        finish(acc[...] + delta(count - 1))
