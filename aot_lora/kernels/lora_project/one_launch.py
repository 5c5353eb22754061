"""The launch that shrinks, multiplies with the base weights, and adds adapters, all at once.

The first blocks of threads shrink, each a part of D for some lanes, and whoever finishes a tile
last sums its parts up; the others multiply a tile of outputs with the base weights meanwhile, where
tiles are few in several parts of D ("split-K"). When a tile is done, so are the shrinks, as a
counter tells, and the adapters are added to its accumulator: an output is written once, and nothing
is gathered, masked or added in between. Blocks of threads start in order, so those that are waited
for always run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE

EARLY = 2
"""Granules up to which a tile loads their B before it waits: more would not fit its registers."""


class _Batch(NamedTuple):
    """What a kernel reads of a batch; see `Counted`. `first`: the layer's first lane in a bank."""

    first: Any
    rows: Any
    owners: Any
    slots: Any
    used: Any

    @property
    def early(self) -> bool:
        """Whether a tile loads all B before it waits; used or not, they are shrunk onto then."""
        return self.granules <= EARLY

    @property
    def granules(self) -> int:
        """Of lanes, used or not."""
        return self.rows.shape[0] // GRANULE

    def places(self, lanes: Any) -> jax.Array:
        """Where lanes of the batch lie in a bank as [lanes, width]."""
        return self.first[0] + self.rows[lanes]


def kernel(
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
    """What a block of threads does.

    Args:
      before, refs: see `pallas_gpu.one_launch`: the arguments of its launch and its results.
      block_d, block_o: of a tile; tiles: of each projection.
      shrinks: tiles of the shrinks, each in `splits` parts of D; shrink: rows, lanes and inputs.
      base_splits: parts of D of a tile of outputs.
      ahead: granules of B that are loaded ahead.
      wait: whether blocks of threads run beside each other.
    """
    batch, x, refs = _Batch(*refs[:5]), refs[5], refs[6:]
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
            _store(outputs[index], first, total)

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
        self.used = batch.early or lane * lanes < batch.used[0] * GRANULE

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
        """B of all granules where they are few, else of the first."""
        count = self.batch.granules if self.batch.early else self.ahead
        return [self._b(self._places(granule)) for granule in range(count)]

    def added(self, total: jax.Array, early: list[jax.Array]) -> jax.Array:
        """The tile with its adapters; what was not loaded early is now, as far as it is used."""
        if self.batch.early:
            owns = [self._h(granule) for granule in range(self.batch.granules)]  # At once.
            for own, b in zip(owns, early, strict=True):
                total = _plus(total, own, b)
            return total
        count, ahead = self.batch.used[0], self.ahead

        def step(turn: Any, carried: Any) -> Any:
            # Where B lies is known a turn ahead of loading it, which is a turn ahead of its use.
            total, places, bs = carried
            first = turn * ahead
            following = tuple(map(self._b, places))
            places = tuple(self._places(first + 2 * ahead + n) for n in range(ahead))
            owns = [self._h(first + n) for n in range(ahead)]
            for number, (own, b) in enumerate(zip(owns, bs, strict=True)):
                if ahead > 1:  # A select takes h through registers.
                    own = jnp.where(first + number < count, own, 0)
                total = _plus(total, own, b)
            return total, places, following

        turns = lax.div(count + ahead - 1, ahead)
        places = tuple(self._places(ahead + n) for n in range(ahead))
        return lax.fori_loop(0, turns, step, (total, places, tuple(early)))[0]

    def _places(self, granule: Any) -> jax.Array:
        """Of a granule's lanes in the bank."""
        return self.batch.places(_lanes(self._inside(granule)))

    def _b(self, places: jax.Array) -> jax.Array:
        return self.bank[places[:, None], _from(self.start, self.width)[None, :]]

    def _h(self, granule: Any) -> jax.Array:
        return self.h[self.module, :, _lanes(self._inside(granule))]

    def _inside(self, granule: Any) -> Any:
        """Past the last granule, the last one: what is loaded ahead and not used."""
        return jnp.minimum(granule, self.batch.granules - 1)


def _lanes(granule: Any) -> Any:
    return pl.ds(granule * GRANULE, GRANULE)


def _plus(total: jax.Array, own: jax.Array, b: jax.Array) -> jax.Array:
    return total + plgpu.dot(own.astype(b.dtype), b)


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


def _store(ref: Any, column: Any, tile: jax.Array) -> None:
    """Stores as much of a tile as there are rows."""
    rows, columns = tile.shape
    if ref.shape[0] == rows:
        ref[:, pl.ds(column, columns)] = tile
        return
    places = _from(0, rows)[:, None]
    inside = jnp.broadcast_to(places < ref.shape[0], tile.shape)
    plgpu.store(ref.at[places, _from(column, columns)[None, :]], tile, mask=inside)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)
