"""lora_project for few rows on a GPU, in one launch whatever the number of projections.

The first blocks of threads shrink, each a part of D for some lanes; the others multiply a tile of
outputs with the base weights meanwhile, where tiles are few in several parts of D ("split-K"). When
a tile is done, so are the shrinks, as a counter tells, and the adapters are added to its
accumulator: an output is written once, and nothing is gathered, masked or added in between. Blocks
of threads start in order, so those that are waited for always run.
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
from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE, Lanes
from aot_lora.kernels.lora_shrink.pallas_gpu import prepare as prepare_lanes
from aot_lora.kernels.sizes import STACKED, Sizes

MOST_TOKENS = 128
"""Rows that one tile holds; with more, weights are read again and large matmuls win."""

_EARLY = 2
"""Granules up to which a tile loads their B before it waits: more would not fit its registers."""

TUNINGS: tuple[dict[str, int], ...] = (
    {},
    {"block_o": 32, "stages": 5},
    {"splits": 1},
    {"splits": 1, "block_d": 64, "block_o": 128, "warps": 8},
    {"base_splits": 2},
    {"base_splits": 2, "splits": 1},
    {"base_splits": 4, "splits": 1},
)


def supports(sizes: Sizes, platform: str) -> str:
    """Why `one_launch` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a GPU"
    if sizes.stacked:
        return STACKED
    if sizes.tokens > MOST_TOKENS:
        return f"more than {MOST_TOKENS} rows"
    if sizes.d % 1024 or any(o % 64 for o in sizes.o):
        return "D is no multiple of 1,024, or O none of 64"
    return ""


class Counted(NamedTuple):
    """What `one_launch` needs of a batch.

    Args:
      lanes: where the batch's lanes lie, and who owns them.
      counters: [2] int32, zeros before and after each call: blocks of threads that are done, those
        that others wait for and those that wait. They go from call to call, because clearing them
        is a launch of its own.
    """

    lanes: Lanes
    counters: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Counted:
    """Once a batch."""
    lanes = prepare_lanes(batch, quantum=quantum, most=most)
    return Counted(lanes, jnp.zeros(2, jnp.int32))


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
      shrink_d, shrink_t, shrink_l: inputs, rows and lanes of a tile of a shrink.
      interpret: on the CPU, for tests.
    """
    rows = x.shape[0]
    tokens = max(16, 1 << (rows - 1).bit_length())
    x = jnp.pad(x, ((0, tokens - rows), (0, 0)))
    lanes = batch.lanes
    slots = jnp.pad(lanes.slots, (0, tokens - rows), constant_values=-1)
    a_banks, b_banks = zip(*banks, strict=True)
    layers, blocks, quantum, _ = a_banks[0].shape
    flat = [bank.reshape(layers * blocks * quantum, -1) for bank in (*a_banks, *b_banks)]
    first = jnp.asarray(layer * (blocks * quantum), jnp.int32).reshape(1)
    block_o = gcd(block_o, *(weight.shape[1] for weight in weights))
    tiles = [weight.shape[1] // block_o for weight in weights]
    width = lanes.rows.shape[0]
    shrinks = tokens // shrink_t * (width // shrink_l) * splits * len(weights)
    found = [jax.ShapeDtypeStruct((tokens, w.shape[1]), x.dtype) for w in weights]
    parts = [jax.ShapeDtypeStruct((base_splits - 1, *one.shape), jnp.float32) for one in found]
    counters, _, *outputs = pl.pallas_call(
        partial(
            _kernel,
            block_d=block_d,
            block_o=block_o,
            tiles=tiles,
            shrinks=shrinks,
            base_splits=base_splits,
            shrink=(shrink_t, shrink_l, shrink_d),
            wait=not interpret,  # It runs one block of threads after the other.
        ),
        out_shape=[
            jax.ShapeDtypeStruct(batch.counters.shape, jnp.int32),
            jax.ShapeDtypeStruct(
                (splits, len(weights), tokens, width), x.dtype if splits == 1 else jnp.float32
            ),
            *found,
            *(parts if base_splits > 1 else ()),
        ],
        grid=(shrinks + base_splits * sum(tiles),),
        input_output_aliases={0: 0},
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="lora_project",
    )(
        batch.counters,
        first,
        lanes.rows,
        lanes.owners,
        slots,
        lanes.granules,
        lanes.wanted,
        lanes.counts,
        x,
        *weights,
        *flat,
    )
    kept = tuple(output[:rows] for output in outputs[: len(weights)])
    return kept, batch._replace(counters=counters)


class _Batch(NamedTuple):
    """What a kernel reads of the batch; see `Lanes`. `first`: the layer's first lane in a bank."""

    first: Any
    rows: Any
    owners: Any
    slots: Any
    granules: Any
    wanted: Any
    counts: Any

    @property
    def early(self) -> bool:
        """Whether a tile loads all B before it waits; used or not, they are shrunk onto then."""
        return self.granules.shape[1] <= _EARLY

    def lanes_of(self, bank: Any, lanes: Any, start: Any, size: int) -> jax.Array:
        """Some columns of lanes of the batch, from a bank as [lanes, width]."""
        columns = start + jnp.arange(size, dtype=jnp.int32)
        return bank[(self.first[0] + self.rows[lanes])[:, None], columns[None, :]]


def _kernel(
    _: Any,
    *refs: Any,
    block_d: int,
    block_o: int,
    tiles: list[int],
    shrinks: int,
    base_splits: int,
    shrink: tuple[int, int, int],
    wait: bool,
) -> None:
    batch, x, refs = _Batch(*refs[:7]), refs[7], refs[8:]
    count, helped = len(tiles), base_splits > 1
    weights, a_banks, b_banks = (refs[n * count : (n + 1) * count] for n in range(3))
    counters, h, *rest = refs[3 * count :]
    outputs = rest[:count]
    parts: list[Any] = rest[count:] or [None] * count
    block, others = pl.program_id(0), shrinks + (base_splits - 1) * sum(tiles)

    def done() -> None:
        if wait:
            plgpu.debug_barrier()  # All threads have stored what the counter says is there.
        _add(counters, _OTHERS, 1)

    def all_done() -> None:
        if wait:
            lax.while_loop(lambda n: n < others, lambda _: _add(counters, _OTHERS, 0), jnp.int32(0))

    @pl.when(block < shrinks)
    def _() -> None:
        _shrink(block, batch, x, a_banks, h, shrink=shrink)
        done()

    split, place = _divided(block - shrinks, sum(tiles))
    own, start = split == base_splits - 1, 0
    for index, size in enumerate(tiles):
        here = (block >= shrinks) & (place >= start) & (place < start + size)
        first = (place - start) * block_o
        base = partial(
            _base,
            x,
            weights[index],
            split,
            first,
            block_d=block_d,
            block_o=block_o,
            splits=base_splits,
        )

        @pl.when(here & ~own)
        def _(base: Any = base, part: Any = parts[index], first: Any = first) -> None:
            if helped:
                part[split, :, pl.ds(first, block_o)] = base()
                done()

        @pl.when(here & own)
        def _(base: Any = base, index: int = index, first: Any = first) -> None:
            adapters = _Adapters(batch, h, index, b_banks[index], first, block_o)
            columns = pl.ds(first, block_o)
            early = adapters.early()
            total = base()
            all_done()
            for other in range(base_splits - 1):
                total += parts[index][other, :, columns]
            outputs[index][:, columns] = adapters.added(total, early).astype(x.dtype)

            # Nobody waits any more once the last tile is here.
            @pl.when(_add(counters, _TILES, 1) == sum(tiles) - 1)
            def _() -> None:
                counters[_OTHERS] = jnp.int32(0)
                counters[_TILES] = jnp.int32(0)

        start += size


_OTHERS, _TILES = 0, 1
"""Which counter is which."""


def _shrink(
    part: Any, batch: _Batch, x: Any, banks: Any, h: Any, *, shrink: tuple[int, int, int]
) -> None:
    """Some rows onto some lanes, over a part of D, of one module."""
    block_t, block_l, block_d = shrink
    splits, _, tokens, width = h.shape
    part, lane = _divided(part, width // block_l)
    part, split = _divided(part, splits)
    module, row = _divided(part, tokens // block_t)
    depth = x.shape[1] // splits
    rows, lanes = pl.ds(row * block_t, block_t), pl.ds(lane * block_l, block_l)
    # Where granules are taken one by one, what no row uses is not loaded, and its h not read.
    used = batch.early or batch.granules[0, lax.div(lane * block_l, GRANULE)] > 0
    for index, bank in enumerate(banks):

        @pl.when(used & (module == index))
        def _(index: int = index, bank: Any = bank) -> None:
            def step(k: Any, total: jax.Array) -> jax.Array:
                start = split * depth + k * block_d
                a = batch.lanes_of(bank, lanes, start, block_d)
                return total + plgpu.dot(x[rows, pl.ds(start, block_d)], a, trans_b=True)

            total = jnp.zeros((block_t, block_l), jnp.float32)
            total = lax.fori_loop(0, depth // block_d, step, total)
            own = batch.slots[rows][:, None] == batch.owners[lanes][None, :]
            h[split, index, rows, lanes] = jnp.where(own, total, 0.0).astype(h.dtype)


def _base(
    x: Any, weight: Any, split: Any, first: Any, *, block_d: int, block_o: int, splits: int
) -> jax.Array:
    """A tile of outputs over a part of D, without adapters."""
    depth = x.shape[1] // splits

    def step(k: Any, total: jax.Array) -> jax.Array:
        inputs = pl.ds(split * depth + k * block_d, block_d)
        return total + plgpu.dot(x[:, inputs], weight[inputs, pl.ds(first, block_o)])

    total = jnp.zeros((x.shape[0], block_o), jnp.float32)
    return lax.fori_loop(0, depth // block_d, step, total)


class _Adapters(NamedTuple):
    """The adapters of one tile: `width` columns from `start` of a module's B."""

    batch: _Batch
    h: Any
    module: int
    bank: Any
    start: Any
    width: int

    def early(self) -> list[jax.Array]:
        """B of all granules, where they are few."""
        count = self.batch.granules.shape[1] if self.batch.early else 0
        return [self._b(granule) for granule in range(count)]

    def added(self, total: jax.Array, early: list[jax.Array]) -> jax.Array:
        """The tile with its adapters; what was not loaded early is now, as far as it is used."""

        def late(number: Any, total: jax.Array) -> jax.Array:
            granule = self.batch.wanted[0, number]
            return self._plus(total, granule, self._b(granule))

        for granule, b in enumerate(early):
            total = self._plus(total, granule, b)
        return total if early else lax.fori_loop(0, self.batch.counts[0], late, total)

    def _b(self, granule: Any) -> jax.Array:
        lanes = pl.ds(granule * GRANULE, GRANULE)
        return self.batch.lanes_of(self.bank, lanes, self.start, self.width)

    def _plus(self, total: jax.Array, granule: Any, b: jax.Array) -> jax.Array:
        lanes = pl.ds(granule * GRANULE, GRANULE)
        own = self.h[0, self.module, :, lanes]
        for split in range(1, self.h.shape[0]):
            own += self.h[split, self.module, :, lanes]
        return total + plgpu.dot(own.astype(b.dtype), b)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)


def _add(counters: Any, which: int, number: int) -> jax.Array:
    """Adds for all blocks of threads to see, and returns what was there."""
    return plgpu.atomic_add(counters, (jnp.int32(which),), jnp.int32(number))
