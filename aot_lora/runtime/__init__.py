"""Lookup, loading, banks and the guard."""

from aot_lora.runtime.guard import forbid_compile
from aot_lora.runtime.runtime import Found, Padded, Runtime

__all__ = ["Found", "Padded", "Runtime", "forbid_compile"]
