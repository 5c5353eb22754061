"""What a worker process does to measure a variant: it compiles it, and reads the analysis."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from aot_lora.errors import ProgramError
from aot_lora.plan import Plan, Variant
from aot_lora.plan.memory import Measured
from aot_lora.warmup.compile import compile_lowered
from aot_lora.warmup.job import this_worker

# XLA's status for a program that does not fit its device, on a CPU, GPU and TPU alike.
_OVERFLOW = "RESOURCE_EXHAUSTED"


def measure(variant: Variant) -> Measured:
    """Compiles a variant for its memory alone; nothing is stored.

    Raises:
      ProgramError: it cannot be traced, or not compiled for another reason than memory.
    """
    worker = this_worker()
    found = worker.trace(variant)
    program = worker.catalog.program(variant)
    weights, banks, cache = _by_kind(worker.job.config.plan, program.args, found.signature.inputs)
    device = (worker.devices[0].memory_stats() or {}) if _present(worker) else {}
    known = Measured(
        variant=variant,
        weights=weights,
        banks=banks,
        cache=cache,
        device=int(device.get("bytes_limit", 0)),
    )
    try:
        compiled = compile_lowered(variant, found.lowered)
    except ProgramError as error:
        if _OVERFLOW not in error.problem:
            raise
        return replace(known, refused=error.problem.partition(_OVERFLOW)[2].strip(": \n"))
    stats = compiled.memory_analysis()
    return replace(
        known,
        others=max(0, stats.argument_size_in_bytes - weights - banks - cache),
        outputs=max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes),
        temporaries=stats.temp_size_in_bytes,
        code=stats.generated_code_size_in_bytes,
    )


def _present(worker: Any) -> bool:
    return not worker.job.target.deviceless  # a topology's devices are not there


def _by_kind(plan: Plan, args: Any, inputs: Any) -> tuple[int, int, int]:
    """Bytes of weights, banks and cache among the arguments, as divided over the devices.

    Banks are known by their shape, the others by the name that the program gives them.
    """
    import jax

    lanes = plan.bank_blocks, plan.quantum
    banks = {(m.layers, *lanes, width) for m in plan.modules for width in (m.d, m.o)}
    sizes = {"weights": 0, "banks": 0, "cache": 0}
    for leaf, spec in zip(jax.tree.leaves(args), inputs, strict=True):
        kind = spec.name.partition("[")[0]
        if spec.shape in banks and spec.dtype == plan.dtype:
            kind = "banks"
        if kind in sizes:
            sharding = getattr(leaf, "sharding", None)
            shape = sharding.shard_shape(spec.shape) if sharding else spec.shape
            sizes[kind] += math.prod(shape) * jax.numpy.dtype(spec.dtype).itemsize
    return sizes["weights"], sizes["banks"], sizes["cache"]
