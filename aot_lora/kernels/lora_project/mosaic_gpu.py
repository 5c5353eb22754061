"""lora_project for many rows on a Hopper GPU: x @ W and h @ B in one accumulator ("K-extended").

A persistent matmul on tensor cores whose K runs over the inputs and then over those lanes that
some row of the tile uses, so that an output is written once and a batch in runs, as prompts are,
pays for about one adapter a tile. Its shape follows JAX's `pallas.ops.gpu.hopper_matmul_mgpu`: one
warpgroup copies, two multiply.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_shrink.pallas_gpu import GRANULE, GROUP, Lanes, lora_shrink
from aot_lora.kernels.sizes import Sizes

_EPILOGUE = 64
"""Rows and columns that an output leaves by at a time."""


def supports(sizes: Sizes, platform: str) -> str:
    """Why `extended` cannot serve these sizes; empty where it can."""
    if platform != "cuda":
        return "it runs on a Hopper GPU"
    if sizes.dtype not in ("bfloat16", "float16"):
        return f"its tensor cores take 16-bit floats, not {sizes.dtype}"
    if sizes.d % 128 or any(o % 256 for o in sizes.o):
        return "D is no multiple of 128, or O none of 256"
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
    shrink_t: int = 64,
    shrink_d: int = 128,
    shrink_l: int = 16,
) -> Arrays:
    """Projections with their adapters. Args and result: see `xla.laned`.

    Args:
      x, weights, banks, layer, batch: see there; `batch` from `lora_shrink.pallas_gpu.prepare`.
      block_o: outputs of a tile; 128 or 256.
      stages: tiles of inputs that are under way at once.
      width: tiles of rows that follow each other before the next outputs, for the cache.
      cores: streaming multiprocessors of the GPU; one block of threads stays on each.
      shrink_t, shrink_d, shrink_l: rows, inputs and lanes of a tile of the shrink.
    """
    rows = x.shape[0]
    padding = -rows % GROUP
    x = jnp.pad(x, ((0, padding), (0, 0)))
    batch = batch._replace(slots=jnp.pad(batch.slots, (0, padding), constant_values=-1))
    a_banks, b_banks = zip(*banks, strict=True)
    h = lora_shrink(x, a_banks, layer, batch, block_t=shrink_t, block_d=shrink_d, block_l=shrink_l)[
        0
    ]
    blocks, quantum = a_banks[0].shape[1:3]
    places = layer * (blocks * quantum) + batch.rows
    outputs: list[jax.Array] = []
    for index, (weight, b_bank) in enumerate(zip(weights, b_banks, strict=True)):
        lanes = b_bank.reshape(-1, b_bank.shape[-1]).at[places].get(mode="promise_in_bounds")
        multiply = plgpu.kernel(
            partial(_kernel, module=index, block_o=block_o, stages=stages, width=width),
            out_type=jax.ShapeDtypeStruct((x.shape[0], weight.shape[1]), x.dtype),
            grid=(cores,),
            grid_names=("core",),
            num_threads=3,
            thread_name="warpgroup",
            scratch_types=_scratch(block_o, stages, x.dtype),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
        )
        outputs.append(multiply(x, weight, h, lanes, batch.wanted, batch.count)[:rows])
    return tuple(outputs)


def _scratch(block_o: int, stages: int, dtype: Any) -> dict[str, Any]:
    tiled = (plgpu.TilingTransform((8, GRANULE)), plgpu.SwizzleTransform(128))
    return {
        "left": plgpu.SMEM((stages, GROUP, GRANULE), dtype, transforms=tiled),
        "right": plgpu.SMEM((stages, GRANULE, block_o), dtype, transforms=tiled),
        "leaving": plgpu.SMEM((2, 2, _EPILOGUE, _EPILOGUE), dtype, transforms=tiled),
        "loaded": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "consumed": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    }


def _kernel(
    x: Any,
    weight: Any,
    h: Any,
    lanes: Any,
    wanted: Any,
    count: Any,
    output: Any,
    *,
    left: Any,
    right: Any,
    leaving: Any,
    loaded: Any,
    consumed: Any,
    module: int,
    block_o: int,
    stages: int,
    width: int,
) -> None:
    groups, columns = x.shape[0] // GROUP, weight.shape[1] // block_o
    inputs = x.shape[1] // GRANULE
    core, warpgroup = lax.axis_index("core"), lax.axis_index("warpgroup")

    def each_tile(work: Any) -> None:
        """Calls work(group, column, step) for this core's tiles; it returns the next step."""
        cores = lax.axis_size("core")
        mine = lax.div(groups * columns - core + cores - 1, cores)

        def one(index: Any, step: Any) -> Any:
            place = plgpu.planar_snake(core + index * cores, (groups, columns), 0, width)
            return work(*place, step)

        lax.fori_loop(0, mine, one, jnp.int32(0))

    @pl.when(warpgroup == 2)
    def _() -> None:
        plgpu.set_max_registers(40, action="decrease")

        def load(group: Any, column: Any, step: Any) -> Any:
            rows = pl.ds(group * GROUP, GROUP)
            outputs = pl.ds(column * block_o, block_o)

            def copy(step: Any, a: Any, b: Any) -> Any:
                slot = lax.rem(step, stages)

                @pl.when(step >= stages)
                def _() -> None:
                    plgpu.barrier_wait(consumed.at[slot])

                plgpu.copy_gmem_to_smem(a, left.at[slot], loaded.at[slot])
                plgpu.copy_gmem_to_smem(b, right.at[slot], loaded.at[slot])
                return step + 1

            def base(k: Any, step: Any) -> Any:
                part = pl.ds(k * GRANULE, GRANULE)
                return copy(step, x.at[rows, part], weight.at[part, outputs])

            def adapters(place: Any, step: Any) -> Any:
                part = pl.ds(wanted[group, place] * GRANULE, GRANULE)
                return copy(step, h.at[module, rows, part], lanes.at[part, outputs])

            step = lax.fori_loop(0, inputs, base, step)
            return lax.fori_loop(0, count[group], adapters, step)

        each_tile(load)

    @pl.when(warpgroup < 2)
    def _() -> None:
        plgpu.set_max_registers(232, action="increase")
        half = pl.ds(warpgroup * 64, 64)

        def multiply(group: Any, column: Any, step: Any) -> Any:
            end = step + inputs + count[group]

            def accumulate(total: Any) -> None:
                def one(step: Any, _: None) -> None:
                    slot = lax.rem(step, stages)
                    plgpu.barrier_wait(loaded.at[slot])
                    plgpu.wgmma(total, left.at[slot, half], right.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(consumed.at[slot])

                lax.fori_loop(step, end, one, None)
                result = total[...].astype(output.dtype)
                for part in range(block_o // _EPILOGUE):
                    within = slice(part * _EPILOGUE, (part + 1) * _EPILOGUE)
                    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                    leaving[warpgroup, part % 2] = result[:, within]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(
                        leaving.at[warpgroup, part % 2],
                        output.at[
                            pl.ds(group * GROUP + warpgroup * 64, 64),
                            pl.ds(column * block_o + part * _EPILOGUE, _EPILOGUE),
                        ],
                    )

            pl.run_scoped(accumulate, total=plgpu.ACC((64, block_o), jnp.float32))
            return end

        each_tile(multiply)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
