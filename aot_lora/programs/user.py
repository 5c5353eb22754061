"""A user's own programs: imported once, called once per point."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from aot_lora import _jax_compat
from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.plan import UserEntry, Variant
from aot_lora.programs.options import SILENT_JAX
from aot_lora.programs.sources import find_top, is_own, search_path
from aot_lora.programs.spec import Context, Point, Program


def load_entry(entry: UserEntry, *, config: Path) -> Callable[[Point, Context], Program]:
    """Imports the function that an entry names.

    Raises:
      ProgramError: the module fails to import, or has no such function.
    """
    module_name, _, function = entry.entry.partition(":")
    where = f"programs: {entry.entry}"
    # Of aot-lora's own it is the running one: worker processes inherit the path, and would take
    # another package of that name beside the config.
    for folder in () if is_own(module_name) else reversed(search_path(config)[:2]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        with _jax_compat.config_kept(where, silent=SILENT_JAX):
            module = importlib.import_module(module_name)
    except AotLoraError:
        sys.modules.pop(module_name, None)  # so that the next variant is refused as well
        raise
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"cannot import `{module_name}`: {type(error).__name__}: {error}",
            where=where,
            next_step="import it in Python and mend what it raises",
        ) from error
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ProgramError(
            f"`{module_name}` has no function `{function}`",
            where=where,
            next_step="define it, or name another after the colon",
        )
    _require_hashed(module_name, where, config)
    return cast("Callable[[Point, Context], Program]", found)


def _require_hashed(module_name: str, where: str, config: Path) -> None:
    """Refuses a module that is not the one whose sources are part of the identity."""
    if is_own(module_name):
        return
    top = module_name.partition(".")[0]
    hashed, imported = find_top(top, config=config), sys.modules[top].__spec__
    if hashed and imported and hashed.origin != imported.origin:
        raise ProgramError(
            f"another `{top}` was imported than the one beside the config",
            where=where,
            expected=str(hashed.origin),
            found=str(imported.origin),
            next_step="give one of the two another name",
        )


def build(
    function: Callable[[Point, Context], Program], variant: Variant, context: Context
) -> Program:
    """Calls a user's function for a variant's point.

    Raises:
      ProgramError: it raises, or returns something else than a `Program`.
    """
    try:
        with _jax_compat.config_kept(variant.name, silent=SILENT_JAX):
            program: Any = function(Point(tokens=variant.tokens, lanes=variant.lanes), context)
    except AotLoraError:
        raise
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"the program raised {type(error).__name__}: {error}",
            where=variant.name,
            next_step="mend the program; --debug shows where it raised",
        ) from error
    if not isinstance(program, Program):
        raise ProgramError(
            "the program returned the wrong thing",
            where=variant.name,
            expected="an aot_lora.Program",
            found=type(program).__name__,
            next_step="return aot_lora.Program(fn=..., args=...)",
        )
    return program
