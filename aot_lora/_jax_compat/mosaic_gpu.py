"""Pallas kernels for Hopper GPUs: what loading their programs needs."""

from __future__ import annotations

import importlib


def ready_to_load(raw: bytes) -> None:
    """Makes the library known that executables with such kernels call, where these bytes are one.

    The module that traces them names it to XLA when it is imported, and a server traces nothing:
    without it, loading ends with "Symbols not found: [ mosaic_gpu_init_tma_desc, .. ]".
    """
    if b"mosaic_gpu" in raw:
        importlib.import_module("jax.experimental.mosaic.gpu.core")
