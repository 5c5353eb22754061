"""lora_project for few rows on a GPU: two launches, whatever the number of projections.

The first shrinks, with D cut into parts; the second reads each weight once, sums the parts and adds
the adapters to its accumulator, so that an output is written once. In between are no gathers, masks
or additions of their own.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import Lanes, lora_shrink, slices
from aot_lora.kernels.sizes import STACKED, Sizes

MOST_TOKENS = 128
"""Rows that one tile holds; with more, weights are read again and large matmuls win."""


_UNROLLED = 8
"""Slices up to which their loop is none: Triton would hold several turns of it in shared memory."""


TUNINGS: tuple[dict[str, int], ...] = (
    {"block_d": 128, "block_o": 128, "splits": 4, "warps": 8, "stages": 4},
    {"block_d": 256, "block_o": 64, "splits": 4, "warps": 4, "stages": 3},
    {"block_d": 256, "block_o": 32, "splits": 8, "warps": 8, "stages": 4},
    {"block_d": 512, "block_o": 32, "splits": 4, "warps": 4, "stages": 3},
    {"block_d": 64, "block_o": 128, "splits": 2, "warps": 8, "stages": 4, "shrink_t": 16},
)


def supports(sizes: Sizes, platform: str) -> str:
    """Why `split_k` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a GPU"
    if sizes.stacked:
        return STACKED
    if sizes.tokens > MOST_TOKENS:
        return f"more than {MOST_TOKENS} rows"
    if sizes.d % 1024 or any(o % 64 for o in sizes.o):
        return "D is no multiple of 1,024, or O none of 64"
    return ""


def split_k(
    x: jax.Array,
    weights: Arrays,
    banks: Banks,
    layer: Layer,
    batch: Lanes,
    *,
    block_d: int = 128,
    block_o: int = 64,
    splits: int = 8,
    warps: int = 4,
    stages: int = 4,
    shrink_d: int = 128,
    shrink_t: int = MOST_TOKENS,
    interpret: bool = False,
) -> Arrays:
    """Projections with their adapters. Args and result: see `xla.laned`.

    Args:
      x, weights, banks, layer, batch: see there; `batch` from `lora_shrink.pallas_gpu.prepare`.
      block_d, block_o: inputs and outputs of a tile of the second launch; fewer outputs where
        their number is no multiple.
      splits: parts of D in the first; shrink_d, shrink_t: inputs and rows of its tile.
      warps, stages: of Triton, in the second.
      interpret: on the CPU, for tests.
    """
    rows = x.shape[0]
    tokens = max(16, 1 << (rows - 1).bit_length())
    x = jnp.pad(x, ((0, tokens - rows), (0, 0)))
    batch = batch._replace(slots=jnp.pad(batch.slots, (0, tokens - rows), constant_values=-1))
    a_banks, b_banks = zip(*banks, strict=True)
    h = lora_shrink(
        x,
        a_banks,
        layer,
        batch,
        block_t=min(shrink_t, tokens),
        block_d=shrink_d,
        splits=splits,
        interpret=interpret,
    )
    starts, flat = slices(b_banks, layer, batch)
    # A tuning of other outputs may have wider tiles than divide these.
    block_o = gcd(block_o, *(weight.shape[1] for weight in weights))
    tiles = [weight.shape[1] // block_o for weight in weights]
    outputs = pl.pallas_call(
        partial(_kernel, block_d=block_d, block_o=block_o, tiles=tiles),
        out_shape=[jax.ShapeDtypeStruct((tokens, w.shape[1]), x.dtype) for w in weights],
        grid=(sum(tiles),),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_project",
    )(starts, batch.used, x, h, *weights, *flat)
    return tuple(output[:rows] for output in outputs)


def _kernel(
    starts: Any,
    used: Any,
    x: Any,
    h: Any,
    *refs: Any,
    block_d: int,
    block_o: int,
    tiles: list[int],
) -> None:
    count = len(tiles)
    weights, banks, outputs = refs[:count], refs[count : 2 * count], refs[2 * count :]
    tokens, depth = x.shape
    width = h.shape[3] // starts.shape[0]
    tile, start = pl.program_id(0), 0
    for index, (weight, bank, output) in enumerate(zip(weights, banks, outputs, strict=True)):
        end = start + tiles[index]

        @pl.when((tile >= start) & (tile < end))
        def _(
            index: int = index,
            weight: Any = weight,
            bank: Any = bank,
            output: Any = output,
            start: int = start,
        ) -> None:
            columns = pl.ds((tile - start) * block_o, block_o)

            def base(k: Any, total: jax.Array) -> jax.Array:
                inputs = pl.ds(k * block_d, block_d)
                return total + plgpu.dot(x[:, inputs], weight[inputs, columns])

            def adapters(lane: Any, total: jax.Array) -> jax.Array:
                lanes = pl.ds(lane * width, width)
                own = h[0, index, :, lanes].astype(jnp.float32)
                for split in range(1, h.shape[0]):
                    own += h[split, index, :, lanes]
                # What nobody uses was not written.
                own = jnp.where(used[0, lane] > 0, own, 0.0)
                b = bank[pl.ds(starts[lane], width), columns]
                return total + plgpu.dot(own.astype(x.dtype), b)

            total = jnp.zeros((tokens, block_o), jnp.float32)
            total = lax.fori_loop(0, depth // block_d, base, total)
            if starts.shape[0] <= _UNROLLED:
                for lane in range(starts.shape[0]):
                    total = adapters(lane, total)
            else:
                total = lax.fori_loop(0, starts.shape[0], adapters, total)
            output[:, columns] = total.astype(output.dtype)

        start = end
