"""The launch that shrinks, multiplies with the base weights, and adds adapters, all at once.

The first blocks of threads shrink, each a part of D for some lanes, and whoever finishes a tile
last sums its parts up; the others multiply a tile of outputs with the base weights meanwhile, where
tiles are few in several parts of D ("split-K"), and of the adapters' lanes where those are many.
When a tile is done, so are the shrinks, as a counter tells, and the adapters are added to its
accumulator: an output is written once, and nothing is gathered, masked or added in between. Blocks
of threads start in order, so those that are waited for always run.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE, onto_lanes

EARLY = 2
"""Granules up to which a tile loads their B before it waits: more would not fit its registers."""


class _Batch(NamedTuple):
    """What a kernel reads of a batch; see `Counted`. `first`: the layer's first lane in a bank."""

    first: Any
    rows: Any
    owners: Any
    order: Any
    slots: Any
    used: Any

    @property
    def early(self) -> bool:
        """Whether a tile loads all B before it waits, used or not."""
        return self.granules <= EARLY

    @property
    def granules(self) -> int:
        """Of lanes, used or not."""
        return self.rows.shape[1] // GRANULE

    def places(self, which: Any, lanes: Any) -> jax.Array:
        """Where lanes of a list lie in a bank as [lanes, width]."""
        return self.first + self.rows[which, lanes]


def kernel(
    _: Any,
    before: Any,
    __: Any,
    *refs: Any,
    block_t: int,
    block_d: int,
    block_o: int,
    tiles: list[int],
    shrinks: int,
    splits: int,
    base_splits: int,
    ahead: int,
    per_layer: int,
    shrink: tuple[int, int, int],
    wait: bool,
) -> None:
    """What a block of threads does.

    Args:
      before, refs: see `pallas_gpu.one_launch`: the arguments of its launch and its results.
      block_t, block_d, block_o: rows, inputs and outputs of a tile; tiles: of each projection, for
        each `block_t` rows.
      shrinks: tiles of the shrinks, each in `splits` parts of D; shrink: rows, lanes and inputs.
      base_splits: parts of D of a tile of outputs.
      ahead: granules of B that are loaded ahead.
      per_layer: lanes of a layer in a bank.
      wait: whether blocks of threads run beside each other.
    """
    (layer, *read), x, refs = refs[:6], refs[6], refs[7:]
    batch = _Batch(layer[0] * per_layer, *read)
    count, helped = len(tiles), base_splits > 1
    weights, a_banks, b_banks = (refs[n * count : (n + 1) * count] for n in range(3))
    done, after, h_counts, h, h_parts, *rest = refs[3 * count :]
    outputs = rest[:count]
    parts: list[Any] = rest[count:] or [None] * count
    groups = h.shape[1] // block_t
    block, whole = pl.program_id(0), sum(tiles) * groups
    others = shrinks + (base_splits - 1) * whole

    # Of earlier calls, as what is done goes on counting; loaded long before it is waited with.
    earlier = before[0]

    @pl.when(block == 0)
    def _() -> None:
        after[0] = earlier + others

    def is_done(counter: Any = done, which: Any = 0) -> jax.Array:
        if wait:
            plgpu.debug_barrier()  # All threads have stored what the counter says is there.
        return plgpu.atomic_add(counter, (jnp.int32(which),), jnp.int32(1))

    def are_done(least: int) -> None:
        if wait:
            # Loads do not get into each other's way, and an atomic, whose result all threads wait
            # for, is what makes seen what others stored.
            look = partial(plgpu.load, done.at[0], volatile=True)
            sure = partial(plgpu.atomic_add, done, (jnp.int32(0),), jnp.int32(0))
            for see in (look, sure):
                lax.while_loop(lambda seen: seen < earlier + least, lambda _, see=see: see(), see())

    @pl.when(block < shrinks * splits)
    def _() -> None:
        part, split = _divided(block, splits)
        tile = _ShrinkTile(part, batch, h.shape[1:], shrink, block_t)

        @pl.when(~tile.used & (split == 0))
        def _() -> None:
            h[tile.place] = jnp.zeros(tile.shape, h.dtype)
            is_done()

        @pl.when(tile.used)
        def _() -> None:
            found = tile.shrunk(split, splits, x, a_banks)
            if splits == 1:
                h[tile.place] = found.astype(h.dtype)
                is_done()
                return
            h_parts[split, part] = found

            @pl.when(is_done(h_counts, part) == splits - 1)
            def _() -> None:  # The last one sums up.
                total = h_parts[0, part]
                for other in range(1, splits):
                    total += h_parts[other, part]
                h[tile.place] = total.astype(h.dtype)
                h_counts[part] = jnp.int32(0)
                is_done()

    split, place = _divided(block - shrinks * splits, whole)
    place, group = _divided(place, groups)  # Those that read the same weights follow each other.
    own, start = split == base_splits - 1, 0
    for index, size in enumerate(tiles):
        here = (block >= shrinks * splits) & (place >= start) & (place < start + size)

        @pl.when(here)
        def _(index: int = index, first: Any = (place - start) * block_o) -> None:
            tile = _Tile(batch, group, groups, block_t, first, block_o)
            base = partial(tile.base, x, weights[index], split, block_d=block_d, splits=base_splits)
            adapters = _Adapters(tile, h, index, b_banks[index], ahead)

            def part(total: jax.Array) -> None:
                parts[index][split, *tile.part] = total
                is_done()

            def whole_of(total: jax.Array) -> jax.Array:
                for other in range(base_splits - 1):
                    total += parts[index][other, *tile.part]
                return total

            if helped and not batch.early:
                # Each a share of D and of granules. Shrinks are the first to count: others wait.
                turns = adapters.turns(split, base_splits)
                early = adapters.at(turns[0])
                total = base()
                are_done(shrinks)
                total = adapters.added(total, early, turns)
                pl.when(~own)(lambda: part(total))

                @pl.when(own)
                def _() -> None:
                    are_done(others)
                    tile.store(outputs[index], whole_of(total))

                return
            if helped:
                pl.when(~own)(lambda: part(base()))

            @pl.when(own)
            def _() -> None:
                turns = adapters.turns(0, 1)
                early = adapters.at(turns[0])
                total = base()
                are_done(others)
                tile.store(outputs[index], adapters.added(whole_of(total), early, turns))

        start += size


class _ShrinkTile:
    """Some rows, in their order by slot, onto some lanes of one module.

    Args:
      number: of the tile; whole: rows and lanes of h; sizes: rows, lanes and inputs of a tile.
      block_t: rows of a tile of outputs.

    `used`: whether a row has a lane here; nothing is loaded where none has.
    """

    def __init__(
        self,
        number: Any,
        batch: _Batch,
        whole: tuple[int, int],
        sizes: tuple[int, int, int],
        block_t: int,
    ) -> None:
        (tokens, width), (rows, lanes, self.depth) = whole, sizes
        number, lane = _divided(number, width // lanes)
        self.module, row = _divided(number, tokens // rows)
        self.shape = rows, lanes
        taken, first = pl.ds(row * rows, rows), lane * lanes
        which = 1 + lax.div(row * rows, block_t) if block_t < tokens else 0
        self.rows, self.places = batch.order[taken], batch.places(which, pl.ds(first, lanes))
        owners = batch.owners[which, pl.ds(first, lanes)]
        self.own = batch.slots[taken][:, None] == owners[None, :]
        self.used = jnp.max(self.own.astype(jnp.int32)) > 0
        self.place = self.module, self.rows[:, None], _from(first, lanes)[None, :]

    def shrunk(self, split: Any, splits: int, x: Any, banks: Any) -> jax.Array:
        """A part of D, in float32; lanes of others are zero."""
        depth = x.shape[1] // splits
        total = jnp.zeros(self.shape, jnp.float32)
        for index, bank in enumerate(banks):
            onto = partial(
                onto_lanes,
                lambda inputs: _rows(x, self.rows, inputs),
                bank,
                self.places,
                shape=self.shape,
                inputs=(split * depth, depth),
                block_d=self.depth,
            )
            total = lax.cond(self.module == index, onto, lambda total=total: total)
        return jnp.where(self.own, total, 0.0)


class _Tile:
    """Some rows and columns of outputs.

    Args:
      batch: whose rows they are; group: of `block_t` rows by slot, of so many groups. One group has
        all rows, as they come.
      first, block_o: columns.

    `which`: the list of the rows' lanes. `part`: where a part of D lies among others' parts.
    """

    def __init__(
        self, batch: _Batch, group: Any, groups: int, block_t: int, first: Any, block_o: int
    ) -> None:
        self.batch, self.block_t, self.first, self.block_o = batch, block_t, first, block_o
        taken = pl.ds(group * block_t, block_t)
        self.rows = batch.order[taken] if groups > 1 else None
        self.which = 1 + group if groups > 1 else 0
        self.part = taken, pl.ds(first, block_o)

    def base(self, x: Any, weight: Any, split: Any, *, block_d: int, splits: int) -> jax.Array:
        """Over a part of D, without adapters."""
        depth = x.shape[1] // splits

        def step(k: Any, total: jax.Array) -> jax.Array:
            inputs = pl.ds(split * depth + k * block_d, block_d)
            return total + plgpu.dot(self.load(x, inputs), weight[inputs, self.part[1]])

        total = jnp.zeros((self.block_t, self.block_o), jnp.float32)
        return lax.fori_loop(0, depth // block_d, step, total)

    def load(self, ref: Any, columns: Any) -> jax.Array:
        """Its rows of [T, width]; zeros where there are no more."""
        if self.rows is None and ref.shape[0] == self.block_t:
            return ref[:, columns]
        return _rows(ref, self._places(), columns)

    def store(self, ref: Any, tile: jax.Array) -> None:
        """Stores as much of it as there are rows."""
        tile = tile.astype(ref.dtype)
        if self.rows is None and ref.shape[0] == self.block_t:
            ref[:, self.part[1]] = tile
            return
        rows = self._places()[:, None]
        inside = jnp.broadcast_to(rows < ref.shape[0], tile.shape)
        plgpu.store(ref.at[rows, _from(self.first, self.block_o)[None, :]], tile, mask=inside)

    def _places(self) -> jax.Array:
        return _from(0, self.block_t) if self.rows is None else self.rows


class _Adapters(NamedTuple):
    """The adapters of one tile of a module's outputs."""

    tile: _Tile
    h: Any
    module: int
    bank: Any
    ahead: int

    def turns(self, share: Any, of: int) -> tuple[Any, Any]:
        """The first turn of a share of all, and the first after it."""
        batch = self.tile.batch
        if batch.early:
            return 0, 1
        turns = lax.div(batch.used[self.tile.which] + self.ahead - 1, self.ahead)
        return lax.div(turns * share, of), lax.div(turns * (share + 1), of)

    def at(self, turn: Any) -> list[jax.Array]:
        """B of the granules of a turn; where granules are few, of all."""
        batch = self.tile.batch
        count = batch.granules if batch.early else self.ahead
        return [self._b(self._places(turn * count + n)) for n in range(count)]

    def added(self, total: jax.Array, first: list[jax.Array], turns: tuple[Any, Any]) -> jax.Array:
        """The tile with those of some turns, the first of which is loaded."""
        batch = self.tile.batch
        if batch.early:
            owns = [self._h(granule) for granule in range(batch.granules)]  # At once.
            for own, b in zip(owns, first, strict=True):
                total = _plus(total, own, b)
            return total
        ahead = self.ahead

        def turn(number: Any, carried: Any) -> Any:
            # Each B is loaded as many granules before its use as there are in a turn, and where it
            # lies as many before that.
            total, *found = carried
            granule = number * ahead
            for n, (places, b) in enumerate(found):
                total = _plus(total, self._h(granule + n), b)
                found[n] = self._places(granule + 2 * ahead + n), self._b(places)
            return (total, *found)

        second = (turns[0] + 1) * ahead
        found = [(self._places(second + n), b) for n, b in enumerate(first)]
        return lax.fori_loop(*turns, turn, (total, *found))[0]

    def _places(self, granule: Any) -> jax.Array:
        """Of a granule's lanes in the bank; past the last granule of any, what is not used."""
        batch = self.tile.batch
        inside = jnp.minimum(granule, batch.granules - 1)
        return batch.places(self.tile.which, _lanes(inside))

    def _b(self, places: jax.Array) -> jax.Array:
        columns = _from(self.tile.first, self.tile.block_o)
        return self.bank[places[:, None], columns[None, :]]

    def _h(self, granule: Any) -> jax.Array:
        lanes, rows = _lanes(granule), self.tile.rows
        if rows is None:
            return self.h[self.module, :, lanes]
        return self.h[self.module, rows[:, None], _from(lanes.start, lanes.size)[None, :]]


def _lanes(granule: Any) -> Any:
    return pl.ds(granule * GRANULE, GRANULE)


def _plus(total: jax.Array, own: jax.Array, b: jax.Array) -> jax.Array:
    return total + plgpu.dot(own.astype(b.dtype), b)


def _from(start: Any, size: int) -> jax.Array:
    return start + jnp.arange(size, dtype=jnp.int32)


def _rows(ref: Any, rows: Any, columns: Any) -> jax.Array:
    """Some rows; zeros where there are none."""
    tile = ref.at[rows[:, None], _from(columns.start, columns.size)[None, :]]
    inside = jnp.broadcast_to(rows[:, None] < ref.shape[0], tile.shape)
    return plgpu.load(tile, mask=inside, other=0)


def _divided(number: Any, by: int) -> tuple[Any, Any]:
    return lax.div(number, by), lax.rem(number, by)
