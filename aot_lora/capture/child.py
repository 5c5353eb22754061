"""What stands in the way of compiles in a process that is recorded."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax

from aot_lora._jax_compat import hooks
from aot_lora._jax_compat.described import context_now
from aot_lora.capture.bootstrap import append
from aot_lora.capture.compiles import describe


def record(folder: str) -> None:
    """Writes each compile of this process to its records: one line before XLA starts, so that
    one that never returns is known as well, and one after it."""
    # Kernels carry source paths and lines otherwise: their fingerprints would move with both.
    jax.config.update("jax_traceback_in_locations_limit", 0)
    hooks.count_xla_runs()
    context = context_now()
    numbers = itertools.count()
    append(folder, {"event": "jax", "version": jax.__version__})

    def hook(inner: Callable[..., Any], *args: Any, **named: Any) -> Any:
        number = next(numbers)
        try:
            fields = describe(args, context)
        except Exception as error:  # Whatever JAX has moved: the program must go on.
            text = f"cannot describe a compile: {type(error).__name__}: {error}"
            append(folder, {"event": "trouble", "text": text})
            return inner(*args, **named)
        append(folder, {"event": "begin", "number": number, **fields})
        before, start = hooks.xla_runs(), time.perf_counter()
        outcome = "failed"
        try:
            executable = inner(*args, **named)
            outcome = "compiled" if hooks.xla_runs() > before else "cache hit"
        finally:
            seconds = round(time.perf_counter() - start, 6)
            append(
                folder,
                {"event": "end", "number": number, "outcome": outcome, "seconds": seconds},
            )
        return executable

    hooks.add_compile_hook(hook)
