"""Pallas kernels for Hopper GPUs: what else is in their programs, and what loading those needs."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false

from __future__ import annotations

import importlib
import sys
from typing import Any

from jax._src.lib.mlir import ir

_BASENAME = "mosaic_gpu.dump_basename"


def name_kernels_alike() -> None:
    """Keeps what this process has traced before out of such kernels.

    jaxlib 0.11 names the files that a kernel may be dumped to, in an attribute of the kernel
    itself, by a number that goes up with each: traced twice, a program would be two. A name that
    is there already is kept. Does nothing in a process without such kernels; once is enough.
    """
    core: Any = sys.modules.get("jax.experimental.mosaic.gpu.core")
    dialect: Any = getattr(core, "dialect", None)
    options = getattr(dialect, "get_or_set_dump_options", None)
    if options is None or getattr(options, "names_alike", False):
        return

    def named_alike(module: Any) -> Any:
        attributes = module.operation.attributes
        if _BASENAME not in attributes:
            attributes[_BASENAME] = ir.StringAttr.get("kernel", context=module.context)
        return options(module)

    setattr(named_alike, "names_alike", True)  # noqa: B010 - pyright knows no such attribute
    dialect.get_or_set_dump_options = named_alike


def ready_to_load(raw: bytes) -> None:
    """Makes the library known that executables with such kernels call, where these bytes are one.

    The module that traces them names it to XLA when it is imported, and a server traces nothing:
    without it, loading ends with "Symbols not found: [ mosaic_gpu_init_tma_desc, .. ]".
    """
    if b"mosaic_gpu" in raw:
        importlib.import_module("jax.experimental.mosaic.gpu.core")
