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
from aot_lora.kernels.lora_project.one_launch import EARLY, kernel
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE, LEAST, as_ref, flat, order
from aot_lora.kernels.lora_shrink.pallas_gpu import prepare as prepare_lanes
from aot_lora.kernels.sizes import STACKED, Sizes

MOST_TOKENS = 128
"""Rows that one tile holds; with more, weights are read again and large matmuls win."""

MOST_MODULES = 4
"""Projections that may read the same rows: they share what counts the shrinks."""

FEW = 64
"""Rows of a tile where there are two: the fewest that a warpgroup's matmul takes."""

MOST_AHEAD = 4
"""Granules of a turn at most; there are a multiple of it, but where all B are loaded early."""

_LAST = 2**20
"""A slot after all others."""

_MANY: dict[str, int] = {"splits": 4, "shrink_t": 64, "shrink_l": 64, "shrink_d": 128}
_WIDE: dict[str, int] = {**_MANY, "block_d": 64, "block_o": 128}
_FEW: dict[str, int] = {**_MANY, "block_t": FEW, "stages": 6, "splits": 2, "ahead": 2}
_SHARED: dict[str, int] = {
    **_MANY,
    "block_t": FEW,
    "block_d": 64,
    "base_splits": 2,
    "splits": 2,
    "shrink_t": 32,
}
TUNINGS: tuple[dict[str, int], ...] = (
    {"base_splits": 2, "splits": 4, "ahead": 2},
    {"base_splits": 2, "splits": 4, "ahead": 4},
    {"base_splits": 2, "splits": 4, "shrink_t": 32},
    {**_MANY, "base_splits": 2, "shrink_l": 32},
    {**_MANY, "ahead": 2},
    {**_FEW, "shrink_t": 32},
    {**_FEW, "shrink_t": 16, "shrink_d": 256},
    {**_WIDE, "splits": 1},  # Shrinks and tiles side by side at once.
    {**_WIDE, "splits": 2, "warps": 8, "ahead": 2},
    {**_WIDE, "splits": 2, "warps": 8, "shrink_t": 128},
    {**_WIDE, "block_t": FEW, "shrink_d": 64, "ahead": 2},
    {"base_splits": 2, "splits": 4, "ahead": 2, "shrink_l": 32},
    _SHARED,
    {**_SHARED, "splits": 4},
    {**_SHARED, "block_o": 128},
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
    """What `one_launch` needs of a batch; T rows and L lanes, padded to whole tiles and turns.

    There are S lists of lanes: one for all rows, and where there are more than `FEW`, one for each
    so many. A list has the granules that some row uses, and then lanes of block 0, which is zero.

    Args:
      rows: [S, L] int32, where each lane lies in a layer of a bank as [blocks * quantum, width].
      owners: [S, L] int32, the slot that owns each lane.
      order: [T] int32, rows by slot, so that few tiles of a shrink have a lane of a row.
      slots: [T] int32, of rows in that order.
      used: [S] int32, how many granules are used.
      done: [1] int32, blocks of threads of this and earlier calls that others waited for, and that
        are done. It goes from call to call, because clearing it is a launch of its own.
      before: [1] int32, how many of them were of earlier calls.
      parts: [tiles of the shrinks] int32, zeros before and after a call: parts of D that are done.
    """

    rows: jax.Array
    owners: jax.Array
    order: jax.Array
    slots: jax.Array
    used: jax.Array
    done: jax.Array
    before: jax.Array
    parts: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Counted:
    """Once a batch."""
    lanes = prepare_lanes(batch, quantum=quantum, most=most)
    count, granules = tile_rows(batch.slots.shape[0]), lanes.wanted.shape[1]
    padding = -granules % MOST_AHEAD if granules > EARLY else 0
    rows, owners = (
        jnp.pad(lane, (0, padding * GRANULE), constant_values=other)
        for lane, other in ((lanes.rows, 0), (lanes.owners, NOBODY))
    )
    slots = jnp.pad(lanes.slots, (0, count - batch.slots.shape[0]), constant_values=-1)
    # Rows of no adapter, padding among them, go last.
    ordered = order(jnp.where(slots < 0, _LAST, slots))
    slots = slots[ordered]
    groups = slots.reshape(-1, min(count, FEW))
    used = (groups[:, :, None] == owners).any(1).reshape(len(groups), -1, GRANULE).any(2)
    wanted = jnp.concatenate([used.any(0)[None], used]) if len(groups) > 1 else used
    granules = jax.vmap(order)(~wanted)
    rows, owners = (
        jnp.where(jnp.take_along_axis(wanted, granules, 1)[:, :, None], lane, other)
        for lane, other in (
            (rows.reshape(-1, GRANULE)[granules], 0),
            (owners.reshape(-1, GRANULE)[granules], NOBODY),
        )
    )
    tiles = count // LEAST * (rows[0].size // LEAST)
    counters = (jnp.zeros(n, jnp.int32) for n in (1, 1, MOST_MODULES * tiles))
    return Counted(
        rows.reshape(len(wanted), -1),
        owners.reshape(len(wanted), -1),
        ordered,
        slots,
        wanted.sum(1, dtype=jnp.int32),
        *counters,
    )


def one_launch(
    x: jax.Array,
    weights: Arrays,
    banks: Banks,
    layer: Layer,
    batch: Counted,
    *,
    block_t: int = MOST_TOKENS,
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
      block_t, block_d, block_o: rows, inputs and outputs of a tile; fewer outputs where they are no
        multiple, and 64 rows or all.
      base_splits: parts of D, and of lanes where those are many, that are multiplied apart.
      splits: parts of D that are shrunk apart.
      warps, stages: of Triton.
      ahead: granules of B that are under way: 1, 2 or 4.
      shrink_d, shrink_t, shrink_l: inputs, rows and lanes of a tile of a shrink.
      interpret: on the CPU, for tests.

    Raises:
      ValueError: `block_t` or `ahead` is another number, for which `prepare` has no lists.
    """
    rows = x.shape[0]
    tokens = tile_rows(rows)
    a_banks, b_banks = zip(*banks, strict=True)
    _, blocks, quantum, _ = a_banks[0].shape
    read, counters = batch[:5], batch[5:]
    block_o = gcd(block_o, *(weight.shape[1] for weight in weights))
    tiles = [weight.shape[1] // block_o for weight in weights]
    width = batch.rows.shape[1]
    block_t = min(block_t, tokens)
    if block_t not in (FEW, tokens) or MOST_AHEAD % ahead:
        raise ValueError(
            f"one_launch has lists of lanes for {FEW} rows or all {tokens}, in turns of 1, 2 or "
            f"{MOST_AHEAD} granules, not for block_t={block_t}, ahead={ahead}"
        )
    shrink_t = min(shrink_t, block_t)
    shrinks = tokens // shrink_t * (width // shrink_l) * len(weights)
    h = jax.ShapeDtypeStruct((len(weights), tokens, width), x.dtype)
    h_parts = jax.ShapeDtypeStruct((splits, shrinks, shrink_t, shrink_l), jnp.float32)
    found = [jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype) for w in weights]
    parts = [
        jax.ShapeDtypeStruct((base_splits - 1, tokens, w.shape[1]), jnp.float32) for w in weights
    ]
    done, before, counts, _, _, *outputs = pl.pallas_call(
        partial(
            kernel,
            block_t=block_t,
            block_d=block_d,
            block_o=block_o,
            tiles=tiles,
            shrinks=shrinks,
            splits=splits,
            base_splits=base_splits,
            ahead=ahead,
            per_layer=blocks * quantum,
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
        grid=(shrinks * splits + base_splits * sum(tiles) * (tokens // block_t),),
        input_output_aliases={0: 0, 2: 2},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_project",
    )(
        *counters,
        as_ref(layer),
        *read,
        x,
        *weights,
        *map(flat, (*a_banks, *b_banks)),
    )
    return tuple(outputs[: len(weights)]), Counted(*read, done, before, counts)
