"""A user's own programs: imported once, called once per point."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from aot_lora.errors import ProgramError
from aot_lora.plan import UserEntry, Variant
from aot_lora.programs.sources import search_path
from aot_lora.programs.spec import Context, Point, Program


def load_entry(entry: UserEntry, *, config: Path) -> Callable[[Point, Context], Program]:
    """Imports the function that an entry names.

    Raises:
      ProgramError: the module fails to import, or has no such function.
    """
    module_name, _, function = entry.entry.partition(":")
    for folder in reversed(search_path(config)[:2]):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"cannot import `{module_name}`: {type(error).__name__}: {error}",
            where=f"programs: {entry.entry}",
            next_step="import it in Python and mend what it raises",
        ) from error
    found: Any = getattr(module, function, None)
    if not callable(found):
        raise ProgramError(
            f"`{module_name}` has no function `{function}`", where=f"programs: {entry.entry}"
        )
    return cast("Callable[[Point, Context], Program]", found)


def build(
    function: Callable[[Point, Context], Program], variant: Variant, context: Context
) -> Program:
    """Calls a user's function for a variant's point.

    Raises:
      ProgramError: it raises, or returns something else than a `Program`.
    """
    try:
        program: Any = function(Point(tokens=variant.tokens, lanes=variant.lanes), context)
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"the program raised {type(error).__name__}: {error}", where=variant.name
        ) from error
    if not isinstance(program, Program):
        raise ProgramError(
            "the program returned the wrong thing",
            where=variant.name,
            expected="an aot_lora.Program",
            found=type(program).__name__,
        )
    return program
