"""A user's own programs: imported once, called once per point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from aot_lora import _jax_compat
from aot_lora.errors import ProgramError
from aot_lora.plan import Point, UserEntry, Variant
from aot_lora.programs.entries import call_entry, import_entry
from aot_lora.programs.options import SILENT_JAX
from aot_lora.programs.spec import Context, Program


def load_entry(entry: UserEntry, *, config: Path) -> Callable[[Point, Context], Program]:
    """Imports the function that an entry names.

    Raises:
      ProgramError: the module fails to import, or has no such function.
    """
    kept = _jax_compat.config_kept(f"programs: {entry.entry}", silent=SILENT_JAX)
    return import_entry(entry, config=config, within=kept)


def build(
    function: Callable[[Point, Context], Program], variant: Variant, context: Context
) -> Program:
    """Calls a user's function for a variant's point.

    Raises:
      ProgramError: it raises, or returns something else than a `Program`.
    """
    kept = _jax_compat.config_kept(variant.name, silent=SILENT_JAX)
    point = Point(tokens=variant.tokens, lanes=variant.lanes)
    program = call_entry(function, variant, point, context, within=kept)
    if not isinstance(program, Program):
        raise ProgramError(
            "the program returned the wrong thing",
            where=variant.name,
            expected="an aot_lora.Program",
            found=type(program).__name__,
            next_step="return aot_lora.Program(fn=..., args=...)",
        )
    return program
