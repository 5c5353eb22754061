"""Compiles StableHLO that JAX did not trace, for a device that need not be there."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax._src.lib.mlir import ir


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """An executable's raw bytes, and the device memory that it takes, in bytes."""

    raw: bytes
    arguments_bytes: int
    outputs_bytes: int
    temporaries_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that it needs at once."""
        return self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes + self.code_bytes


def compile_stablehlo(text: str, device: Any) -> Compiled:
    """Compiles a module for one device of a topology, with the compiler's defaults."""
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        devices = xla_client.DeviceList((device,))
        found: Any = device.client.compile(module, devices, options)
    stats: Any = found.get_compiled_memory_stats()
    return Compiled(
        raw=bytes(found.serialize()),
        arguments_bytes=stats.argument_size_in_bytes,
        outputs_bytes=max(0, stats.output_size_in_bytes - stats.alias_size_in_bytes),
        temporaries_bytes=stats.temp_size_in_bytes,
        code_bytes=stats.generated_code_size_in_bytes,
    )
