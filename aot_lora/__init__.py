"""Recompile-free multi-LoRA serving on XLA.

`aot-lora warmup` compiles every variant of a plan before the deploy; `Runtime` only looks up.

Letters: T tokens, D inputs, O outputs, R rank, S slots, L lanes. Importing this package loads
neither jax nor anything else that is heavy, and has no side effect.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aot_lora import errors

if TYPE_CHECKING:
    from aot_lora.config import Config, load_config
    from aot_lora.plan import Point
    from aot_lora.programs.spec import BatchArgs, Context, Program
    from aot_lora.runtime import Found, Padded, Runtime, allow_compile, forbid_compile
    from aot_lora.runtime.jit import jit, recording, replay
    from aot_lora.warmup import Report

_HOMES = {
    "BatchArgs": "aot_lora.programs.spec",
    "Config": "aot_lora.config",
    "Context": "aot_lora.programs.spec",
    "Found": "aot_lora.runtime",
    "Padded": "aot_lora.runtime",
    "Point": "aot_lora.plan",
    "Program": "aot_lora.programs.spec",
    "Report": "aot_lora.warmup",
    "Runtime": "aot_lora.runtime",
    "allow_compile": "aot_lora.runtime",
    "forbid_compile": "aot_lora.runtime",
    "jit": "aot_lora.runtime.jit",
    "load_config": "aot_lora.config",
    "recording": "aot_lora.runtime.jit",
    "replay": "aot_lora.runtime.jit",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = [
    "BatchArgs",
    "Config",
    "Context",
    "Found",
    "Padded",
    "Point",
    "Program",
    "Report",
    "Runtime",
    "allow_compile",
    "errors",
    "forbid_compile",
    "jit",
    "load_config",
    "recording",
    "replay",
]
