"""Compiles each form of the TPU kernels for one chip of a topology; prints what came of it.

Run as a process of its own: the compiler needs its environment before jax is imported, and may
end the process.
"""

import json
import math
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.forms import FORMS
from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_fused import pallas_tpu as fused
from aot_lora.kernels.lora_segments import pallas_tpu as segmented
from aot_lora.kernels.lora_segments.segments import segments
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink
from aot_lora.plan import TargetSpec
from aot_lora.targets.devices import compile_devices

T, D, O_SIZE, QUANTUM, COUNT = 128, 1024, 2048, 8, 32  # 256 lanes
WHOLE = P()
BANK = 512  # blocks a layer, of which a batch reads COUNT


def forms(array: Any) -> dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]]:
    """name -> (function, abstract arguments, donated arguments)."""
    integers = partial(array, dtype=jnp.int32)
    x, base, h = array(T, D), array(T, O_SIZE), array(T, COUNT * QUANTUM)
    a_bank, b_bank = array(8, BANK, QUANTUM, D), array(8, BANK, QUANTUM, O_SIZE)
    layer, blocks, owners, slots = integers(), integers(COUNT), integers(COUNT), integers(T)
    few = {"block_t": 32, "block_l": 128}

    def lora_segments(base: Any, x: Any, *rest: Any) -> Any:
        a_bank, b_bank, layer, blocks, owners, slots = rest
        batch = segments(blocks, owners, slots, 32)
        return segmented.lora_segments(base, x, a_bank, b_bank, layer, batch, slots, block_l=128)

    return {
        "shrink": (shrink.lora_shrink, (x, a_bank, layer, blocks, owners, slots), ()),
        "shrink, many blocks": (
            partial(shrink.lora_shrink, **few, block_d=256),
            (x, a_bank, layer, blocks, owners, slots),
            (),
        ),
        "shrink, one adapter": (shrink.lora_shrink_single, (x, a_bank, layer, blocks), ()),
        "expand": (expand.lora_expand, (base, h, b_bank, layer, blocks, slots), (0,)),
        "expand, many blocks": (
            partial(expand.lora_expand, **few, block_o=256),
            (base, h, b_bank, layer, blocks, slots),
            (0,),
        ),
        "expand, one adapter": (expand.lora_expand_single, (base, h, b_bank, layer, blocks), (0,)),
        "segments": (lora_segments, (base, x, a_bank, b_bank, layer, blocks, owners, slots), (0,)),
        "fused": (
            fused.lora_fused,
            (x, array(D, O_SIZE), h, b_bank, layer, blocks, slots),
            (),
        ),
    }


def split(array: Any, mesh: Any) -> dict[str, tuple[Any, tuple[Any, ...], tuple[int, ...]]]:
    """The forms of lora_project inside `jax.shard_map`, a projection split by its outputs."""
    integers, columns = partial(array, dtype=jnp.int32), P(None, "tp")
    batch = Batch(integers(COUNT), integers(COUNT), integers(T))
    of_b = P(None, None, None, "tp")
    banks = array(8, BANK, QUANTUM, D), array(8, BANK, QUANTUM, O_SIZE, spec=of_b)
    args = (array(T, D), array(D, O_SIZE, spec=columns), banks, integers(), batch)

    def run(form: Any, x: Any, w: Any, banks: Any, layer: Any, batch: Any) -> Any:
        prepared = form.prepare(batch, quantum=QUANTUM, most=4)
        return form.project(x, (w,), (banks,), layer, prepared)[0]

    specs = (WHOLE, columns, (WHOLE, of_b), WHOLE, WHOLE)
    return {
        name: (
            jax.shard_map(partial(run, form), mesh=mesh, in_specs=specs, out_specs=columns),
            args,
            (),
        )
        for name, form in FORMS.items()
        if name.startswith("tpu_")
    }


def main(topology: str) -> None:
    chips = math.prod(map(int, topology.partition(":")[2].split("x")))
    devices = compile_devices(TargetSpec(platform="tpu", topology=topology, devices=chips))
    mesh = jax.sharding.Mesh(devices, ("tp",))

    def array(*shape: int, dtype: Any = jnp.bfloat16, spec: P = WHOLE) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    for name, (fn, args, donated) in (forms(array) if chips == 1 else split(array, mesh)).items():
        traced = jax.jit(fn, donate_argnums=donated).trace(*args)
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
        memory = compiled.memory_analysis()
        line = {
            "form": name,
            "kernel": "tpu_custom_call" in compiled.as_text(),
            "temporary_bytes": memory.temp_size_in_bytes,
            "aliased_bytes": memory.alias_size_in_bytes,
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
