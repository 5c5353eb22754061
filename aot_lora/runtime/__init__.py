"""Lookup, loading, banks, the guard and `aot_lora.jit`. Each is imported when first asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from aot_lora.runtime.guard import allow_compile, forbid_compile
    from aot_lora.runtime.runtime import Found, Padded, Runtime

_HOMES = {
    "Found": "aot_lora.runtime.runtime",
    "Padded": "aot_lora.runtime.runtime",
    "Runtime": "aot_lora.runtime.runtime",
    "allow_compile": "aot_lora.runtime.guard",
    "forbid_compile": "aot_lora.runtime.guard",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = ["Found", "Padded", "Runtime", "allow_compile", "forbid_compile"]
