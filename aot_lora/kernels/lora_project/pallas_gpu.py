"""lora_project for few rows on a GPU, in one launch whatever the number of projections.

What the launch does is in `one_launch`. Pallas through Triton: see `lora_shrink.pallas_gpu`.
"""

from __future__ import annotations

from functools import partial
from math import gcd
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import NOBODY, Layer
from aot_lora.kernels.lora_project.one_launch import kernel
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE, LEAST
from aot_lora.kernels.lora_shrink.pallas_gpu import prepare as prepare_lanes
from aot_lora.kernels.sizes import STACKED, Sizes

MOST_TOKENS = 128
"""Rows that one tile holds; with more, weights are read again and large matmuls win."""

MOST_MODULES = 4
"""Projections that may read the same rows: they share what counts the shrinks."""

_MANY: dict[str, int] = {"splits": 4, "shrink_t": 64, "shrink_d": 128}
_WIDE: dict[str, int] = {"block_d": 64, "block_o": 128}
TUNINGS: tuple[dict[str, int], ...] = (
    {"base_splits": 2},
    {"base_splits": 2, "splits": 4, "ahead": 2},
    {"base_splits": 2, "splits": 4, "shrink_t": 32},
    {"splits": 1, "ahead": 2},
    {**_WIDE, "warps": 8},
    {**_WIDE, **_MANY},
    {**_WIDE, **_MANY, "shrink_l": 64},
    {**_WIDE, **_MANY, "shrink_l": 64, "splits": 1},  # Shrinks and tiles side by side at once.
    {**_WIDE, **_MANY, "shrink_l": 64, "splits": 2, "shrink_t": 128, "warps": 8},
    {**_WIDE, **_MANY, "splits": 8, "warps": 8, "stages": 6},
    {**_MANY, "shrink_l": 64},
    {**_MANY, "shrink_l": 32, "base_splits": 2},
)


def supports(sizes: Sizes, platform: str) -> str:
    """Why `one_launch` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a GPU"
    if sizes.stacked:
        return STACKED
    if sizes.tokens > MOST_TOKENS:
        return f"more than {MOST_TOKENS} rows"
    if len(sizes.o) > MOST_MODULES:
        return f"more than {MOST_MODULES} projections"
    if sizes.d % 1024 or any(o % 64 for o in sizes.o):
        return "D is no multiple of 1,024, or O none of 64"
    return ""


def tile_rows(rows: int) -> int:
    """Rows of a tile of outputs, a power of two; those past the batch's are masked."""
    return max(LEAST, 1 << (rows - 1).bit_length())


class Counted(NamedTuple):
    """What `one_launch` needs of a batch; L lanes, padded to whole granules.

    Args:
      rows: [L] int32, where each lane lies in a layer of a bank seen as [blocks * quantum, width]:
        first the granules that some row uses, then lanes of block 0, which is zero.
      owners: [L] int32, the slot that owns each lane.
      slots: [T] int32.
      used: [1] int32, how many granules are used.
      done: [1] int32, blocks of threads of this and earlier calls that others waited for, and that
        are done. It goes from call to call, because clearing it is a launch of its own.
      before: [1] int32, how many of them were of earlier calls.
      parts: [tiles of the shrinks] int32, zeros before and after a call: parts of D that are done.
    """

    rows: jax.Array
    owners: jax.Array
    slots: jax.Array
    used: jax.Array
    done: jax.Array
    before: jax.Array
    parts: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Counted:
    """Once a batch."""
    lanes = prepare_lanes(batch, quantum=quantum, most=most)
    order, count = lanes.wanted[0], lanes.counts[:1]  # Rows of one tile are one group.
    inside = (jnp.arange(order.shape[0]) < count)[:, None]
    rows, owners = (
        jnp.where(inside, lane.reshape(-1, GRANULE)[order], other).reshape(-1)
        for lane, other in ((lanes.rows, 0), (lanes.owners, NOBODY))
    )
    tiles = tile_rows(batch.slots.shape[0]) // LEAST * (rows.shape[0] // LEAST)
    counters = (jnp.zeros(n, jnp.int32) for n in (1, 1, MOST_MODULES * tiles))
    return Counted(rows, owners, lanes.slots, count, *counters)


def one_launch(
    x: jax.Array,
    weights: Arrays,
    banks: Banks,
    layer: Layer,
    batch: Counted,
    *,
    block_d: int = 128,
    block_o: int = 64,
    base_splits: int = 1,
    splits: int = 2,
    warps: int = 4,
    stages: int = 4,
    ahead: int = 1,
    shrink_d: int = 256,
    shrink_t: int = 16,
    shrink_l: int = 16,
    interpret: bool = False,
) -> tuple[Arrays, Counted]:
    """Projections with their adapters, and the batch for the next call. See `xla.laned`.

    Args:
      x, weights, banks, layer, batch: see there; `batch` from `prepare` or the call before.
      block_d, block_o: inputs and outputs of a tile; fewer outputs where they are no multiple.
      base_splits: parts of D that are multiplied apart; splits: that are shrunk apart.
      warps, stages: of Triton.
      ahead: granules of B that are under way while as many before them are multiplied.
      shrink_d, shrink_t, shrink_l: inputs, rows and lanes of a tile of a shrink.
      interpret: on the CPU, for tests.
    """
    rows = x.shape[0]
    tokens = tile_rows(rows)
    a_banks, b_banks = zip(*banks, strict=True)
    layers, blocks, quantum, _ = a_banks[0].shape
    read, counters = batch[:4], batch[4:]
    flat = [bank.reshape(layers * blocks * quantum, -1) for bank in (*a_banks, *b_banks)]
    first = jnp.asarray(layer * (blocks * quantum), jnp.int32).reshape(1)
    block_o = gcd(block_o, *(weight.shape[1] for weight in weights))
    tiles = [weight.shape[1] // block_o for weight in weights]
    width = batch.rows.shape[0]
    shrink_t = min(shrink_t, tokens)
    shrinks = tokens // shrink_t * (width // shrink_l) * len(weights)
    h = jax.ShapeDtypeStruct((len(weights), tokens, width), x.dtype)
    h_parts = jax.ShapeDtypeStruct((splits, *h.shape), jnp.float32)
    found = [jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype) for w in weights]
    parts = [
        jax.ShapeDtypeStruct((base_splits - 1, tokens, w.shape[1]), jnp.float32) for w in weights
    ]
    done, before, counts, _, _, *outputs = pl.pallas_call(
        partial(
            kernel,
            block_d=block_d,
            block_o=block_o,
            tiles=tiles,
            shrinks=shrinks,
            splits=splits,
            base_splits=base_splits,
            ahead=ahead,
            shrink=(shrink_t, shrink_l, shrink_d),
            wait=not interpret,  # It runs one block of threads after the other.
        ),
        out_shape=[
            *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in counters),
            h,
            h_parts,
            *found,
            *(parts if base_splits > 1 else ()),
        ],
        grid=(shrinks * splits + base_splits * sum(tiles),),
        input_output_aliases={0: 0, 2: 2},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_project",
    )(
        *counters,
        first,
        *read,
        x,
        *weights,
        *flat,
    )
    return tuple(outputs[: len(weights)]), Counted(*read, done, before, counts)
