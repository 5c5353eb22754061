"""lora_project for many rows on a Hopper GPU: x @ W and h @ B in one accumulator ("K-extended").

A persistent matmul on tensor cores whose K runs over the inputs and then over those lanes that
some row of the tile uses, so that an output is written once and a batch in runs, as prompts are,
pays for about one adapter a tile. Its shape follows JAX's `pallas.ops.gpu.hopper_matmul_mgpu`: one
warpgroup copies, two multiply.

The shrinks are in the same launch. Tiles of outputs seldom come out even: some cores have one less
than others, and those shrink first, while the others multiply with the base weights. Where that
would take too long all cores shrink first, each a part of D ("split-K"), or the shrinks are a
launch of Triton's before.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate, product
from math import gcd
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import (
    GRANULE,
    GROUP,
    LEAST,
    Lanes,
    as_ref,
    flat,
    lora_shrink,
    multiprocessors,
)
from aot_lora.kernels.sizes import STACKED, Sizes

MOST = 4
"""Projections whose shrinks are one matmul: the N of a tensor core instruction is 256 at most."""

_HALF = GROUP // 2
"""Rows that a warpgroup multiplies: the M of a tensor core instruction."""

_EPILOGUE = 64
"""Rows and columns that an output leaves by at a time."""


TUNINGS: tuple[dict[str, int], ...] = (
    {},
    {"ahead": 0},
    {"parts": 2},
    {"parts": 2, "ahead": 0},
    {"parts": 4, "ahead": 0},
    {"apart": 1, "shrink_d": 512},
    {"apart": 1, "shrink_l": 32, "shrink_d": 256},
    {"apart": 1, "shrink_l": 64, "shrink_d": 256},
    {"block_o": 128, "stages": 6},
)


def supports(sizes: Sizes, platform: str) -> str:
    """Why `extended` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a Hopper GPU"
    if sizes.stacked:
        return STACKED
    if sizes.dtype not in ("bfloat16", "float16"):
        return f"its tensor cores take 16-bit floats, not {sizes.dtype}"
    if len(sizes.o) > MOST:
        return f"more than {MOST} projections"
    if sizes.d % 128 or any(o % 256 for o in sizes.o):
        return "D is no multiple of 128, or O none of 256"
    if jax.__version_info__ < (0, 11):
        return f"it needs jax 0.11, and this is {jax.__version__}"
    return ""


def extended(
    x: jax.Array,
    weights: Arrays,
    banks: Banks,
    layer: Layer,
    batch: Lanes,
    *,
    apart: int = 0,
    shrink_t: int = 32,
    shrink_l: int = LEAST,
    shrink_d: int = 128,
    **tuning: int,
) -> Arrays:
    """Projections with their adapters. Args and result: see `xla.laned`.

    Args:
      x, weights, banks, layer, batch: see there; `batch` from `lora_shrink.pallas_gpu.prepare`.
      apart: 1 for the shrinks in a launch of their own.
      shrink_t, shrink_l, shrink_d: rows, lanes and inputs of a tile of the shrinks that are.
      tuning: see `launch`.
    """
    rows, padding = x.shape[0], -x.shape[0] % GROUP
    x = jnp.pad(x, ((0, padding), (0, 0)))
    batch = batch._replace(slots=jnp.pad(batch.slots, (0, padding), constant_values=-1))
    h = None
    if apart:
        a_banks = tuple(a for a, _ in banks)
        h = lora_shrink(
            x, a_banks, layer, batch, block_t=shrink_t, block_l=shrink_l, block_d=shrink_d
        )
    outputs = launch(x, weights, banks, layer, batch, h=h, **tuning)[-len(weights) :]
    return tuple(output[:rows] for output in outputs)


def launch(
    x: jax.Array,
    weights: Arrays,
    banks: Banks,
    layer: Layer,
    batch: Lanes,
    *,
    h: jax.Array | None = None,
    block_o: int = 256,
    stages: int = 4,
    width: int = 8,
    cores: int = 0,
    ahead: int = 3,
    parts: int = 1,
) -> Arrays:
    """h [M, T, L], unless it is given; what it is added up from, if that is in parts; the outputs.

    Args:
      x, weights, banks, layer, batch: see `extended`; T a multiple of a group.
      h: the shrinks. Lanes of others are zero; granules that no row of a group uses are not
        computed, nor loaded, and hold anything.
      block_o: outputs of a tile; 128 or 256.
      stages: tiles of inputs that are under way at once.
      width: tiles of rows that follow each other before the next outputs, for the cache.
      cores: blocks of threads; as many as `multiprocessors` unless given. One stays on each. They
        wait for each other, so all have to be there at once.
      ahead: shrinks that a core does which has one tile less than others; if there are more, all
        cores share them.
      parts: of D, that a shrink is done in by as many cores.
    """
    rows, modules, cores = x.shape[0], len(weights), cores or multiprocessors()
    a_banks, b_banks = zip(*banks, strict=True)
    b_side = side_by_side(b_banks, layer, batch)
    a_side = side_by_side(a_banks, layer, batch) if h is None else b_side  # That nobody reads.
    sides = a_side, b_side
    _, blocks, quantum, _ = banks[0][0].shape
    of_h = modules, rows, batch.rows.shape[0]
    shrinks = (jax.ShapeDtypeStruct(of_h, x.dtype),)
    if parts > 1:
        shrinks += (jax.ShapeDtypeStruct((parts - 1, *of_h), jnp.float32),)
    outputs = tuple(jax.ShapeDtypeStruct((rows, w.shape[1]), x.dtype) for w in weights)
    kernel = plgpu.kernel(
        partial(
            _kernel,
            shrinks=h is None,
            modules=modules,
            block_o=block_o,
            width=width,
            ahead=ahead,
            parts=parts,
            per_layer=blocks * quantum,
            lanes=slice_lanes(quantum),
        ),
        out_type=shrinks * (h is None) + outputs,
        grid=(cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(block_o, stages, GRANULE // slice_lanes(quantum), modules, x.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    return kernel(
        x,
        batch.slots,
        batch.owners,
        batch.used,
        batch.total,
        batch.wanted,
        batch.counts,
        *(as_ref(layer) for layer, _, _ in sides),
        *(places for _, places, _ in sides),
        *(bank for _, _, banks in sides for bank in banks),
        *weights,
        *(() if h is None else (h,)),
    )


def slice_lanes(quantum: int) -> int:
    """Lanes that lie side by side in a bank, and that the matmul takes from there as one."""
    return max(gcd(quantum, GRANULE), LEAST)


def side_by_side(
    banks: tuple[jax.Array, ...], layer: Layer, lanes: Lanes
) -> tuple[Layer, jax.Array, list[jax.Array]]:
    """The layer, where each lane lies in it [L] int32, and each bank as [lanes, width].

    Blocks smaller than a slice are laid side by side first: a copy of the batch's lanes.
    """
    _, blocks, quantum, _ = banks[0].shape
    if quantum % slice_lanes(quantum) == 0:
        return layer, lanes.rows, [flat(bank) for bank in banks]
    places = layer * (blocks * quantum) + lanes.rows
    copies = [flat(bank).at[places].get(mode="promise_in_bounds") for bank in banks]
    return 0, jnp.arange(lanes.rows.shape[0], dtype=jnp.int32), copies


def _scratch(block_o: int, stages: int, pieces: int, modules: int, dtype: Any) -> dict[str, Any]:
    ring = min(stages, stages * block_o // (modules * GRANULE))
    tiled_floats = (plgpu.TilingTransform((8, GRANULE // 2)), plgpu.SwizzleTransform(128))
    tiled = (plgpu.TilingTransform((8, GRANULE)), plgpu.SwizzleTransform(128))
    return {
        "left": plgpu.SMEM((stages, GROUP, GRANULE), dtype, transforms=tiled),
        # Weights and B, or A: see `drained`.
        "right": plgpu.RefUnion(
            plgpu.SMEM((stages, GRANULE, block_o), dtype, transforms=tiled),
            plgpu.SMEM((ring, modules * GRANULE, GRANULE), dtype, transforms=tiled),
        ),
        # Outputs and h, or parts of it.
        "leaving": plgpu.RefUnion(
            plgpu.SMEM((2, 2, _EPILOGUE, _EPILOGUE), dtype, transforms=tiled),
            plgpu.SMEM((2, _EPILOGUE, _EPILOGUE), jnp.float32, transforms=tiled_floats),
        ),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # A granule comes in as many pieces as it has slices: these are the ones after the first.
        "whole": plgpu.Barrier(num_arrivals=max(pieces - 1, 1), num_barriers=stages),
        # Of a shrink: rows, and all pieces of all modules.
        "given": plgpu.Barrier(num_arrivals=1 + pieces * modules, num_barriers=ring),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def _kernel(
    x: Any,
    slots: Any,
    owners: Any,
    used: Any,
    total: Any,
    wanted: Any,
    counts: Any,
    a_layer: Any,
    b_layer: Any,
    a_places: Any,
    b_places: Any,
    *refs: Any,
    left: Any,
    right: Any,
    leaving: Any,
    loaded: Any,
    whole: Any,
    given: Any,
    consumed: Any,
    shrinks: bool,
    modules: int,
    block_o: int,
    width: int,
    ahead: int,
    parts: int,
    per_layer: int,
    lanes: int,
) -> None:
    a_banks, b_banks, weights = (refs[n * modules : (n + 1) * modules] for n in range(3))
    h, *sums = refs[3 * modules : -modules]
    outputs = refs[-modules:]
    right, a_right = right
    leaving, leaving_sum = leaving
    ends = list(accumulate(weight.shape[1] // block_o for weight in weights))
    groups, inputs = x.shape[0] // GROUP, x.shape[1] // GRANULE
    pieces, granules, stages = GRANULE // lanes, owners.shape[0] // GRANULE, left.shape[0]
    ring = a_right.shape[0]
    core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")
    cores = lax.axis_size("core")
    shrunk: Any = None
    summed: Any = None
    if shrinks:  # Two for each granule that a group of rows waits for.
        shrunk = pl.get_global(plgpu.SemaphoreType.REGULAR((groups,)))
    if sums:  # And for each part that a granule of a group waits for.
        summed = pl.get_global(plgpu.SemaphoreType.REGULAR((groups, granules)))

    def each_shrink(work: Any, step: Any) -> Any:
        """Calls work(group, granule, part, step) for this core's; each returns the next step."""
        spare = -groups * ends[-1] % cores or cores
        takers = jnp.where(total[0] <= ahead * spare, spare, cores)
        count = total[0] * parts

        def one(index: Any, step: Any) -> Any:
            place = core + index * takers  # A part comes after those that its core waits for.
            pair = used[lax.div(place, parts)]
            return work(
                lax.div(pair, granules), lax.rem(pair, granules), lax.rem(place, parts), step
            )

        mine = jnp.where(core < takers, lax.div(count - core + takers - 1, takers), 0)
        return lax.fori_loop(0, mine, one, step)

    def inputs_of(part: Any) -> tuple[Any, Any]:
        """The first granule of inputs of a part of a shrink, and the first of the next."""
        return lax.div(part * inputs, parts), lax.div((part + 1) * inputs, parts)

    def each_tile(work: Any, step: Any) -> Any:
        """Calls work(group, column, step) for this core's tiles; each returns the next step."""
        seat = cores - 1 - core  # The cores that start first shrink: nobody waits for one to come.
        mine = lax.div(groups * ends[-1] - seat + cores - 1, cores)

        def one(index: Any, step: Any) -> Any:
            place = plgpu.planar_snake(seat + index * cores, (groups, ends[-1]), 0, width)
            return work(*place, step)

        return lax.fori_loop(0, mine, one, step)

    def in_module(column: Any, work: Any) -> None:
        """Calls work(module, its own column) for the projection that a column of tiles is of."""
        for module, end in enumerate(ends):
            start = ends[module - 1] if module else 0
            pl.when((column >= start) & (column < end))(partial(work, module, column - start))

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def free(step: Any, first: Any, ring: int) -> Any:
            slot = lax.rem(step, ring)

            @pl.when(step >= first + ring)
            def _() -> None:
                plgpu.barrier_wait(consumed.at[slot])

            return slot

        def drained(first: Any, end: Any, ring: int) -> Any:
            """Waits until steps from the first are consumed, so that other tiles may lie there."""

            def one(step: Any, _: None) -> None:
                plgpu.barrier_wait(consumed.at[lax.rem(step, ring)])

            lax.fori_loop(lax.max(end - ring, first), end, one, None)
            return end

        def starts(layer: Any, places: Any, granule: Any) -> list[Any]:
            first = layer[0] * per_layer
            found = [places[granule * GRANULE + n * lanes] for n in range(pieces)]
            return [pl.multiple_of(first + place, 8) for place in found]

        def load_shrink(group: Any, granule: Any, part: Any, step: Any) -> Any:
            at = starts(a_layer, a_places, granule)

            def one(k: Any, step: Any) -> Any:
                slot, columns = free(step, 0, ring), pl.ds(k * GRANULE, GRANULE)
                rows = x.at[pl.ds(group * GROUP, GROUP), columns]
                plgpu.copy_gmem_to_smem(rows, left.at[slot], given.at[slot])
                for n, (bank, start) in enumerate(product(a_banks, at)):
                    plgpu.copy_gmem_to_smem(
                        bank.at[pl.ds(start, lanes), columns],
                        a_right.at[slot, pl.ds(n * lanes, lanes)],
                        given.at[slot],
                    )
                return step + 1

            return lax.fori_loop(*inputs_of(part), one, step)

        def load_tile(group: Any, column: Any, step: Any) -> Any:
            rows = pl.ds(group * GROUP, GROUP)

            def base(k: Any, step: Any) -> Any:
                slot, part = free(step, first, stages), pl.ds(k * GRANULE, GRANULE)
                plgpu.copy_gmem_to_smem(x.at[rows, part], left.at[slot], loaded.at[slot])

                def copy(module: int, own: Any) -> None:
                    source = weights[module].at[part, pl.ds(own * block_o, block_o)]
                    plgpu.copy_gmem_to_smem(source, right.at[slot], loaded.at[slot])

                in_module(column, copy)
                return step + 1

            def adapters(place: Any, step: Any) -> Any:
                granule = wanted[group, place]
                at, slot = starts(b_layer, b_places, granule), free(step, first, stages)

                def copy(module: int, own: Any) -> None:
                    source = h.at[module, rows, pl.ds(granule * GRANULE, GRANULE)]
                    plgpu.copy_gmem_to_smem(source, left.at[slot], loaded.at[slot])
                    for n, start in enumerate(at):
                        plgpu.copy_gmem_to_smem(
                            b_banks[module].at[pl.ds(start, lanes), pl.ds(own * block_o, block_o)],
                            right.at[slot, pl.ds(n * lanes, lanes)],
                            (whole if n else loaded).at[slot],
                        )

                in_module(column, copy)
                return step + 1

            step = lax.fori_loop(0, inputs, base, step)
            if shrinks:
                pl.semaphore_wait(shrunk.at[group], 2 * counts[group], decrement=False)
            return lax.fori_loop(0, counts[group], adapters, step)

        first = jnp.int32(0)
        if shrinks:
            first = drained(first, each_shrink(load_shrink, first), ring)
        drained(first, each_tile(load_tile, first), stages)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        half = pl.ds(warpgroup * _HALF, _HALF)
        accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]

        def load(numbers: Any, layout: Any) -> Any:
            return plgpu.load(numbers, layout=layout, optimized=False)  # pyright: ignore[reportCallIssue]

        def take(total: Any, slot: Any, b: Any, *barriers: Any) -> None:
            for barrier in barriers:
                plgpu.barrier_wait(barrier.at[slot])
            plgpu.wgmma(total, left.at[slot, half], b)
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(consumed.at[slot])

        def shrink(group: Any, granule: Any, part: Any, step: Any) -> Any:
            rows = pl.ds(group * GROUP + warpgroup * _HALF, _HALF)
            columns = pl.ds(granule * GRANULE, GRANULE)
            first, end = inputs_of(part)

            def along(numbers: Any, axis: int) -> Any:
                """Numbers out of an array, along an axis of the result."""
                layout = plgpu.Layout.WGMMA.reduce(1 - axis)
                return lax.broadcast_in_dim(load(numbers, layout), (_HALF, GRANULE), (axis,))

            def leave(place: Any, result: Any, to: Any) -> None:
                place[...] = result.astype(to.dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(place, to.at[rows, columns])

            def finish(results: list[Any]) -> None:
                own = along(slots.at[rows], 0) == along(owners.at[columns], 1)
                if sums:
                    arrivals = 2 * (parts - 1)
                    pl.semaphore_wait(summed.at[group, granule], arrivals, decrement=False)
                for module, result in enumerate(results):
                    for other in range(parts - 1):
                        of_it = sums[0].at[other, module, rows, columns]
                        result += load(of_it, plgpu.Layout.WGMMA)
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    place = leaving.at[warpgroup, module % 2]
                    leave(place, jnp.where(own, result, 0.0), h.at[module])
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(shrunk.at[group])

            def pass_on(results: list[Any]) -> None:
                for module, result in enumerate(results):
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    leave(leaving_sum.at[warpgroup], result, sums[0].at[part, module])
                plgpu.wait_smem_to_gmem(0)
                pl.semaphore_signal(summed.at[group, granule])

            def tile(total: Any) -> None:
                def one(k: Any, _: None) -> None:
                    slot = lax.rem(step + k - first, ring)
                    take(total, slot, a_right.at[slot].transpose((1, 0)), given)

                lax.fori_loop(first, end, one, None)
                widths = [slice(m * GRANULE, (m + 1) * GRANULE) for m in range(modules)]
                result = total[...]
                results = [result[:, width] for width in widths]
                if sums:
                    pl.when(part < parts - 1)(partial(pass_on, results))
                    pl.when(part == parts - 1)(partial(finish, results))
                else:
                    finish(results)

            pl.run_scoped(tile, total=accumulator((_HALF, modules * GRANULE), jnp.float32))
            return step + end - first

        def multiply(group: Any, column: Any, step: Any) -> Any:
            middle = step + inputs
            end = middle + counts[group]

            def tile(total: Any) -> None:
                def one(step: Any, _: None, *barriers: Any) -> None:
                    slot = lax.rem(step, stages)
                    take(total, slot, right.at[slot], *barriers)

                pieced = (loaded, whole) if pieces > 1 else (loaded,)
                lax.fori_loop(step, middle, lambda step, _: one(step, None, loaded), None)
                lax.fori_loop(middle, end, lambda step, _: one(step, None, *pieced), None)
                result = total[...].astype(outputs[0].dtype)

                def store(module: int, own: Any) -> None:
                    for part in range(block_o // _EPILOGUE):
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        within = slice(part * _EPILOGUE, (part + 1) * _EPILOGUE)
                        leaving[warpgroup, part % 2] = result[:, within]
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(
                            leaving.at[warpgroup, part % 2],
                            outputs[module].at[
                                pl.ds(group * GROUP + warpgroup * _HALF, _HALF),
                                pl.ds(own * block_o + part * _EPILOGUE, _EPILOGUE),
                            ],
                        )

                in_module(column, store)

            pl.run_scoped(tile, total=accumulator((_HALF, block_o), jnp.float32))
            return end

        each_tile(multiply, each_shrink(shrink, jnp.int32(0)) if shrinks else jnp.int32(0))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
