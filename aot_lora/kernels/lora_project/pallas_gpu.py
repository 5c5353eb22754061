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

MOST_MODULES = 4
"""Projections that may read the same rows: they share what counts the shrinks."""

_LEAST = 16
"""The fewest rows and lanes of a tile of a shrink: those of a tensor core instruction."""

_EARLY = 2
"""Granules up to which a tile loads their B before it waits: more would not fit its registers."""

_MANY: dict[str, int] = {"splits": 4, "shrink_t": 64, "shrink_d": 128}
_WIDE: dict[str, int] = {"block_d": 64, "block_o": 128}
TUNINGS: tuple[dict[str, int], ...] = (
    {"base_splits": 2},
    {"base_splits": 2, "splits": 4, "ahead": 4},
    {"base_splits": 2, "splits": 4, "shrink_t": 32},
    {"base_splits": 4, "splits": 4, "block_d": 64, "stages": 6},
    {"splits": 1, "ahead": 2},
    {**_WIDE, "warps": 8},
    {**_WIDE, **_MANY},
    {**_WIDE, **_MANY, "warps": 8, "stages": 6, "splits": 8},
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
    return max(_LEAST, 1 << (rows - 1).bit_length())


class Counted(NamedTuple):
    """What `one_launch` needs of a batch.

    Args:
      lanes: where the batch's lanes lie, and who owns them.
      done: [1] int32, blocks of threads of this and earlier calls that others waited for, and that
        are done. It goes from call to call, because clearing it is a launch of its own.
      before: [1] int32, how many of them were of earlier calls.
      parts: [tiles of the shrinks] int32, zeros before and after a call: parts of D that are done.
    """

    lanes: Lanes
    done: jax.Array
    before: jax.Array
    parts: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Counted:
    """Once a batch."""
    lanes = prepare_lanes(batch, quantum=quantum, most=most)
    tiles = tile_rows(batch.slots.shape[0]) // _LEAST * (lanes.rows.shape[0] // _LEAST)
    return Counted(lanes, *(jnp.zeros(n, jnp.int32) for n in (1, 1, MOST_MODULES * tiles)))


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
    lanes = batch.lanes
    a_banks, b_banks = zip(*banks, strict=True)
    layers, blocks, quantum, _ = a_banks[0].shape
    flat = [bank.reshape(layers * blocks * quantum, -1) for bank in (*a_banks, *b_banks)]
    first = jnp.asarray(layer * (blocks * quantum), jnp.int32).reshape(1)
    block_o = gcd(block_o, *(weight.shape[1] for weight in weights))
    tiles = [weight.shape[1] // block_o for weight in weights]
    width = lanes.rows.shape[0]
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
            _kernel,
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
            *(jax.ShapeDtypeStruct(one.shape, one.dtype) for one in batch[1:]),
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
        batch.done,
        batch.before,
        batch.parts,
        first,
        lanes.rows,
        lanes.owners,
        lanes.slots,
        lanes.granules,
        lanes.wanted,
        lanes.counts,
        x,
        *weights,
        *flat,
    )
    return tuple(outputs[: len(weights)]), Counted(lanes, done, before, counts)


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

    def places(self, lanes: Any) -> jax.Array:
        """Where lanes of the batch lie in a bank as [lanes, width]."""
        return self.first[0] + self.rows[lanes]


def _kernel(
    _: Any,
    before: Any,
    __: Any,
    *refs: Any,
    block_d: int,
    block_o: int,
    tiles: list[int],
    shrinks: int,
    splits: int,
    base_splits: int,
    ahead: int,
    shrink: tuple[int, int, int],
    wait: bool,
) -> None:
    batch, x, refs = _Batch(*refs[:7]), refs[7], refs[8:]
    count, helped = len(tiles), base_splits > 1
    weights, a_banks, b_banks = (refs[n * count : (n + 1) * count] for n in range(3))
    done, after, h_counts, h, h_parts, *rest = refs[3 * count :]
    outputs = rest[:count]
    parts: list[Any] = rest[count:] or [None] * count
    block, others = pl.program_id(0), shrinks + (base_splits - 1) * sum(tiles)

    # Of this call and of those before; what is done goes on counting.
    target = before[0] + others

    @pl.when(block == 0)
    def _() -> None:
        after[0] = target

    def is_done(counter: Any = done, which: Any = 0) -> jax.Array:
        if wait:
            plgpu.debug_barrier()  # All threads have stored what the counter says is there.
        return plgpu.atomic_add(counter, (jnp.int32(which),), jnp.int32(1))

    def all_done() -> None:
        if wait:
            # Loads do not get into each other's way, and an atomic, whose result all threads wait
            # for, is what makes seen what others stored.
            look = partial(plgpu.load, done.at[0], volatile=True)
            sure = partial(plgpu.atomic_add, done, (jnp.int32(0),), jnp.int32(0))
            for see in (look, sure):
                lax.while_loop(lambda seen: seen < target, lambda _, see=see: see(), see())

    @pl.when(block < shrinks * splits)
    def _() -> None:
        part, split = _divided(block, splits)
        tile = _ShrinkTile(part, batch, h.shape[1:], shrink)
        if splits == 1:
            h[tile.place] = tile.shrunk(0, 1, x, a_banks).astype(h.dtype)
            is_done()
            return
        h_parts[split, *tile.place] = tile.shrunk(split, splits, x, a_banks)

        @pl.when(is_done(h_counts, part) == splits - 1)
        def _() -> None:  # The last one sums up.
            total = h_parts[0, *tile.place]
            for other in range(1, splits):
                total += h_parts[other, *tile.place]
            h[tile.place] = total.astype(h.dtype)
            h_counts[part] = jnp.int32(0)
            is_done()

    split, place = _divided(block - shrinks * splits, sum(tiles))
    own, start = split == base_splits - 1, 0
    for index, size in enumerate(tiles):
        here = (block >= shrinks * splits) & (place >= start) & (place < start + size)
        first = (place - start) * block_o
        base = partial(
            _base,
            x,
            weights[index],
            split,
            first,
            tokens=h.shape[1],
            block_d=block_d,
            block_o=block_o,
            splits=base_splits,
        )

        @pl.when(here & ~own)
        def _(base: Any = base, part: Any = parts[index], first: Any = first) -> None:
            if helped:
                part[split, :, pl.ds(first, block_o)] = base()
                is_done()

        @pl.when(here & own)
        def _(base: Any = base, index: int = index, first: Any = first) -> None:
            adapters = _Adapters(batch, h, index, b_banks[index], first, block_o, ahead)
            columns = pl.ds(first, block_o)
            early = adapters.early()
            total = base()
            all_done()
            for other in range(base_splits - 1):
                total += parts[index][other, :, columns]
            total = adapters.added(total, early).astype(x.dtype)
            _store(outputs[index], 0, first, total)

        start += size


class _ShrinkTile:
    """Some rows onto some lanes of one module."""

    def __init__(
        self, number: Any, batch: _Batch, whole: tuple[int, int], sizes: tuple[int, int, int]
    ) -> None:
        (tokens, width), (rows, lanes, depth) = whole, sizes
        number, lane = _divided(number, width // lanes)
        self.module, row = _divided(number, tokens // rows)
        self.batch, self.depth = batch, depth
        self.first, self.shape = row * rows, (rows, lanes)
        self.lanes = pl.ds(lane * lanes, lanes)
        self.place = self.module, pl.ds(self.first, rows), self.lanes  # in h [modules, T, L]
        # Where granules are taken one by one, what no row uses is not loaded, and its h not read.
        self.used = batch.early or batch.granules[0, lax.div(lane * lanes, GRANULE)] > 0

    def shrunk(self, split: Any, splits: int, x: Any, banks: Any) -> jax.Array:
        """A part of D, in float32; lanes of others are zero."""
        rows, _ = self.shape
        places = self.batch.places(self.lanes)
        slots = _from(self.first, rows)
        slots = plgpu.load(
            self.batch.slots.at[slots], mask=slots < self.batch.slots.shape[0], other=-1
        )
        own = slots[:, None] == self.batch.owners[self.lanes][None, :]
        part = x.shape[1] // splits

        def onto(bank: Any) -> jax.Array:
            def step(k: Any, total: jax.Array) -> jax.Array:
                start = split * part + k * self.depth
                a = bank[places[:, None], _from(start, self.depth)[None, :]]
                tile = _load(x, self.first, rows, start, self.depth)
                return total + plgpu.dot(tile, a, trans_b=True)

            total = jnp.zeros(self.shape, jnp.float32)
            return lax.fori_loop(0, part // self.depth, step, total)

        total = jnp.zeros(self.shape, jnp.float32)
        for index, bank in enumerate(banks):
            wanted = self.used & (self.module == index)
            total = lax.cond(wanted, partial(onto, bank), lambda total=total: total)
        return jnp.where(own, total, 0.0)


def _base(
    x: Any,
    weight: Any,
    split: Any,
    first: Any,
    *,
    tokens: int,
    block_d: int,
    block_o: int,
    splits: int,
) -> jax.Array:
    """A tile of outputs over a part of D, without adapters."""
    depth = x.shape[1] // splits

    def step(k: Any, total: jax.Array) -> jax.Array:
        start = split * depth + k * block_d
        own = _load(x, 0, tokens, start, block_d)
        return total + plgpu.dot(own, weight[pl.ds(start, block_d), pl.ds(first, block_o)])

    total = jnp.zeros((tokens, block_o), jnp.float32)
    return lax.fori_loop(0, depth // block_d, step, total)


class _Adapters(NamedTuple):
    """The adapters of one tile: `width` columns from `start` of a module's B."""

    batch: _Batch
    h: Any
    module: int
    bank: Any
    start: Any
    width: int
    ahead: int

    def early(self) -> list[jax.Array]:
        """B of all granules where they are few, else of the first that are used."""
        if self.batch.early:
            return [self._b(granule) for granule in range(self.batch.granules.shape[1])]
        return self._following(0)

    def added(self, total: jax.Array, early: list[jax.Array]) -> jax.Array:
        """The tile with its adapters; what was not loaded early is now, as far as it is used."""
        if self.batch.early:
            for granule, b in enumerate(early):
                total = self._plus(total, granule, b)
            return total
        count = self.batch.counts[0]

        def step(turn: Any, carried: Any) -> Any:
            total, *found = carried
            following = self._following(turn + 1)
            for number, b in enumerate(found):
                place = turn * self.ahead + number
                total = self._plus(total, self._wanted(place), b, place < count)
            return (total, *following)

        turns = lax.div(count + self.ahead - 1, self.ahead)
        return lax.fori_loop(0, turns, step, (total, *early))[0]

    def _following(self, turn: Any) -> list[jax.Array]:
        """B of the granules of a turn."""
        return [self._b(self._wanted(turn * self.ahead + n)) for n in range(self.ahead)]

    def _wanted(self, place: Any) -> Any:
        return self.batch.wanted[0, jnp.minimum(place, self.batch.wanted.shape[1] - 1)]

    def _b(self, granule: Any) -> jax.Array:
        places = self.batch.places(pl.ds(granule * GRANULE, GRANULE))
        return self.bank[places[:, None], _from(self.start, self.width)[None, :]]

    def _plus(self, total: jax.Array, granule: Any, b: jax.Array, used: Any = True) -> jax.Array:
        lanes = pl.ds(granule * GRANULE, GRANULE)
        own = self.h[self.module, :, lanes]
        return total + plgpu.dot(jnp.where(used, own, 0).astype(b.dtype), b)


def _from(start: Any, size: int) -> jax.Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def _load(ref: Any, row: Any, rows: int, column: Any, columns: int) -> jax.Array:
    """A tile of an array whose rows may end within it; zeros follow."""
    if ref.shape[0] % rows == 0:
        return ref[pl.ds(row, rows), pl.ds(column, columns)]
    places = _from(row, rows)[:, None]
    tile = ref.at[places, _from(column, columns)[None, :]]
    inside = jnp.broadcast_to(places < ref.shape[0], (rows, columns))
    return plgpu.load(tile, mask=inside, other=0)


def _store(ref: Any, row: Any, column: Any, tile: jax.Array) -> None:
    """Stores as much of a tile as there are rows."""
    rows, columns = tile.shape
    if ref.shape[0] % rows == 0:
        ref[pl.ds(row, rows), pl.ds(column, columns)] = tile
        return
    places = _from(row, rows)[:, None]
    inside = jnp.broadcast_to(places < ref.shape[0], tile.shape)
    plgpu.store(ref.at[places, _from(column, columns)[None, :]], tile, mask=inside)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)
