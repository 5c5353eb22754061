"""lora_project for many rows on a Hopper GPU: x @ W and h @ B in one accumulator ("K-extended").

A persistent matmul on tensor cores whose K runs over the inputs and then over those lanes that
some row of the tile uses, so that an output is written once and a batch in runs, as prompts are,
pays for about one adapter a tile. Its shape follows JAX's `pallas.ops.gpu.hopper_matmul_mgpu`: one
warpgroup copies, two multiply.
"""

from __future__ import annotations

from functools import partial
from itertools import accumulate
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
)
from aot_lora.kernels.sizes import STACKED, Sizes

_EPILOGUE = 64
"""Rows and columns that an output leaves by at a time."""


TUNINGS: tuple[dict[str, int], ...] = (
    {},
    {"shrink_d": 256},
    {"shrink_d": 512},
    {"shrink_l": 32, "shrink_d": 256},
    {"shrink_l": 64, "shrink_d": 256},
    {"shrink_l": 64, "shrink_t": 16},
    {"shrink_l": 64, "shrink_t": 64},
    {"block_o": 128},
)


def supports(sizes: Sizes, platform: str) -> str:
    """Why `extended` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a Hopper GPU"
    if sizes.stacked:
        return STACKED
    if sizes.dtype not in ("bfloat16", "float16"):
        return f"its tensor cores take 16-bit floats, not {sizes.dtype}"
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
    block_o: int = 256,
    stages: int = 4,
    width: int = 8,
    cores: int = 132,
    shrink_t: int = 32,
    shrink_l: int = LEAST,
    shrink_d: int = 128,
) -> Arrays:
    """Projections with their adapters. Args and result: see `xla.laned`.

    Args:
      x, weights, banks, layer, batch: see there; `batch` from `lora_shrink.pallas_gpu.prepare`.
      block_o: outputs of a tile; 128 or 256.
      stages: tiles of inputs that are under way at once.
      width: tiles of rows that follow each other before the next outputs, for the cache.
      cores: streaming multiprocessors of the GPU; one block of threads stays on each.
      shrink_t, shrink_l, shrink_d: rows, lanes and inputs of a tile of the shrink.
    """
    rows = x.shape[0]
    padding = -rows % GROUP
    x = jnp.pad(x, ((0, padding), (0, 0)))
    batch = batch._replace(slots=jnp.pad(batch.slots, (0, padding), constant_values=-1))
    a_banks, b_banks = zip(*banks, strict=True)
    h = lora_shrink(
        x, a_banks, layer, batch, block_t=shrink_t, block_l=shrink_l, block_d=shrink_d, cores=cores
    )
    _, blocks, quantum, _ = b_banks[0].shape
    layer, places, flat_banks = side_by_side(b_banks, layer, batch)
    multiply = plgpu.kernel(
        partial(
            _kernel,
            block_o=block_o,
            stages=stages,
            width=width,
            modules=len(weights),
            per_layer=blocks * quantum,
            lanes=slice_lanes(quantum),
        ),
        out_type=tuple(jax.ShapeDtypeStruct((x.shape[0], w.shape[1]), x.dtype) for w in weights),
        grid=(cores,),
        grid_names=("core",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types=_scratch(block_o, stages, GRANULE // slice_lanes(quantum), x.dtype),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )
    outputs = multiply(
        x, h, as_ref(layer), places, batch.wanted, batch.counts, *weights, *flat_banks
    )
    return tuple(output[:rows] for output in outputs)


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


def _scratch(block_o: int, stages: int, pieces: int, dtype: Any) -> dict[str, Any]:
    tiled = (plgpu.TilingTransform((8, GRANULE)), plgpu.SwizzleTransform(128))
    return {
        "left": plgpu.SMEM((stages, GROUP, GRANULE), dtype, transforms=tiled),
        "right": plgpu.SMEM((stages, GRANULE, block_o), dtype, transforms=tiled),
        "leaving": plgpu.SMEM((2, 2, _EPILOGUE, _EPILOGUE), dtype, transforms=tiled),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        # A granule comes in as many pieces as it has slices: these are the ones after the first.
        "whole": plgpu.Barrier(num_arrivals=max(pieces - 1, 1), num_barriers=stages),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def _kernel(
    x: Any,
    h: Any,
    layer: Any,
    places: Any,
    wanted: Any,
    count: Any,
    *refs: Any,
    left: Any,
    right: Any,
    leaving: Any,
    loaded: Any,
    whole: Any,
    consumed: Any,
    modules: int,
    block_o: int,
    stages: int,
    width: int,
    per_layer: int,
    lanes: int,
) -> None:
    weights, banks, outputs = refs[:modules], refs[modules : 2 * modules], refs[2 * modules :]
    ends = list(accumulate(weight.shape[1] // block_o for weight in weights))
    groups, inputs = x.shape[0] // GROUP, x.shape[1] // GRANULE
    pieces = GRANULE // lanes
    core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")

    def each_tile(work: Any) -> Any:
        """Calls work(group, column, step) for this core's tiles; each returns the next step."""
        cores = lax.axis_size("core")
        mine = lax.div(groups * ends[-1] - core + cores - 1, cores)

        def one(index: Any, step: Any) -> Any:
            place = plgpu.planar_snake(core + index * cores, (groups, ends[-1]), 0, width)
            return work(*place, step)

        return lax.fori_loop(0, mine, one, jnp.int32(0))

    def in_module(column: Any, work: Any) -> None:
        """Calls work(module, its own column) for the projection that a column of tiles is of."""
        for module, end in enumerate(ends):
            start = ends[module - 1] if module else 0
            pl.when((column >= start) & (column < end))(partial(work, module, column - start))

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(group: Any, column: Any, step: Any) -> Any:
            rows = pl.ds(group * GROUP, GROUP)

            def free(step: Any) -> Any:
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                return slot

            def base(k: Any, step: Any) -> Any:
                slot, part = free(step), pl.ds(k * GRANULE, GRANULE)
                plgpu.copy_gmem_to_smem(x.at[rows, part], left.at[slot], loaded.at[slot])

                def copy(module: int, own: Any) -> None:
                    source = weights[module].at[part, pl.ds(own * block_o, block_o)]
                    plgpu.copy_gmem_to_smem(source, right.at[slot], loaded.at[slot])

                in_module(column, copy)
                return step + 1

            def adapters(place: Any, step: Any) -> Any:
                slot, granule = free(step), wanted[group, place]

                def copy(module: int, own: Any) -> None:
                    part = pl.ds(granule * GRANULE, GRANULE)
                    source = h.at[module, rows, part]
                    plgpu.copy_gmem_to_smem(source, left.at[slot], loaded.at[slot])
                    for piece in range(pieces):
                        lane = places[granule * GRANULE + piece * lanes]
                        start = pl.multiple_of(layer[0] * per_layer + lane, 8)
                        plgpu.copy_gmem_to_smem(
                            banks[module].at[pl.ds(start, lanes), pl.ds(own * block_o, block_o)],
                            right.at[slot, pl.ds(piece * lanes, lanes)],
                            (whole if piece else loaded).at[slot],
                        )

                in_module(column, copy)
                return step + 1

            step = lax.fori_loop(0, inputs, base, step)
            return lax.fori_loop(0, count[group], adapters, step)

        end = each_tile(load)

        def leave(step: Any, _: None) -> None:
            plgpu.barrier_wait(consumed.at[lax.rem(step, stages)])

        lax.fori_loop(lax.max(end - stages, 0), end, leave, None)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        half = pl.ds(warpgroup * 64, 64)

        def multiply(group: Any, column: Any, step: Any) -> Any:
            middle = step + inputs
            end = middle + count[group]

            def tile(total: Any) -> None:
                def take(step: Any, adapters: bool) -> None:
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    if adapters and pieces > 1:
                        plgpu.barrier_wait(whole.at[slot])
                    plgpu.wgmma(total, left.at[slot, half], right.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[slot])

                lax.fori_loop(step, middle, lambda step, _: take(step, False), None)
                lax.fori_loop(middle, end, lambda step, _: take(step, True), None)
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
                                pl.ds(group * GROUP + warpgroup * 64, 64),
                                pl.ds(own * block_o + part * _EPILOGUE, _EPILOGUE),
                            ],
                        )

                in_module(column, store)

            accumulator = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
            pl.run_scoped(tile, total=accumulator((64, block_o), jnp.float32))
            return end

        each_tile(multiply)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
