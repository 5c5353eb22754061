"""Kernels inside StableHLO: MLIR bytecode of the dialects of Mosaic and Triton, as text."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from functools import cache
from typing import Any

from jax._src.interpreters import mlir
from jax._src.lib import mosaic_gpu_dialect, tpu, triton
from jax._src.lib.mlir import ir


def payload_text(bytecode: bytes, *, of_tpu: bool) -> str | None:
    """A kernel's module without locations, or None where this jaxlib cannot read it.

    Names of a kernel's arguments, and under 0.10.2 of its operations, are locations too.
    """
    try:
        module = ir.Module.parse(bytecode, context=_context(of_tpu))
    except (ir.MLIRError, ValueError):
        return None
    return str(module.operation.get_asm(enable_debug_info=False))


@cache
def _context(of_tpu: bool) -> Any:
    """One for the process: it takes as long to make as a kernel to read."""
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True  # Stored under `stable_mosaic` and the like.
    context.load_all_available_dialects()
    # Not all in one: once the TPU's is there, jaxlib 0.12 lowers kernels for GPUs otherwise.
    for dialect in (tpu,) if of_tpu else (triton.dialect, mosaic_gpu_dialect):
        dialect.register_dialect(context)
    return context
