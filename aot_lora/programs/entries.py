"""Imports and calls what an entry of a config names. No jax: torch_xla's programs need none."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.plan import UserEntry, Variant
from aot_lora.programs.sources import find_top, is_own, search_path


def import_entry(
    entry: UserEntry, *, config: Path, within: AbstractContextManager[None] | None = None
) -> Callable[..., Any]:
    """Imports the function that an entry names.

    Args:
      entry: of the plan.
      config: the config's file; the module is looked for beside it.
      within: what the import runs in.

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
        with within or nullcontext():
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
    return found


def call_entry(
    function: Callable[..., Any],
    variant: Variant,
    *arguments: Any,
    within: AbstractContextManager[None] | None = None,
) -> Any:
    """What a user's function returns for a variant.

    Args:
      function: from `import_entry`.
      variant: for errors.
      arguments: of the function.
      within: what the call runs in.

    Raises:
      ProgramError: it raises.
    """
    try:
        with within or nullcontext():
            return function(*arguments)
    except AotLoraError:
        raise
    except (Exception, SystemExit) as error:
        raise ProgramError(
            f"the program raised {type(error).__name__}: {error}",
            where=variant.name,
            next_step="mend the program; --debug shows where it raised",
        ) from error


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
