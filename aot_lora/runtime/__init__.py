"""Lookup, loading, banks and the guard."""

from aot_lora.runtime.guard import allow_compile, forbid_compile
from aot_lora.runtime.runtime import Found, Padded, Runtime

__all__ = ["Found", "Padded", "Runtime", "allow_compile", "forbid_compile"]
