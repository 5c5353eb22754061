"""Which source files a function of a running process depends on, by its module. No jax here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path

from aot_lora.errors import CoverageError
from aot_lora.programs.sources import digest_files, own_digest

# Their versions are part of the target's identity, or come with Python.
_VERSIONED = frozenset(
    {"jax", "jaxlib", "numpy", "ml_dtypes", "aot_lora", *sys.stdlib_module_names}
)
_VERSIONED_MAIN = "__main__"  # listed among Python's modules, but it is the user's script


def tops(modules: Iterable[str]) -> tuple[str, ...]:
    """The top-level packages and single files of modules whose sources count, sorted."""
    found = {module.partition(".")[0] for module in modules}
    return tuple(sorted(top for top in found if top == _VERSIONED_MAIN or top not in _VERSIONED))


def module_digests(names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of the Python files behind top-level modules, by part.

    A package counts with all of its files, a single file with its neighbours, ``__main__`` as the
    script that runs. aot-lora's own files count always.

    Raises:
      CoverageError: a module is not there.
    """
    digests = {"source of aot_lora": own_digest()}
    for name in names:
        digests[f"source of {name}"] = digest_files(_files(name))
    return digests


def digested(parts: Iterable[str]) -> tuple[str, ...]:
    """The module names among the parts that `module_digests` made."""
    marked = (part.removeprefix("source of ") for part in parts if part.startswith("source of "))
    return tuple(name for name in marked if name != "aot_lora")


def _files(name: str) -> list[tuple[str, Path]]:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    roots = list(getattr(module, "__path__", None) or ())
    if module is None:
        spec = importlib.util.find_spec(name)
        roots = list((spec and spec.submodule_search_locations) or ())
        file = spec.origin if spec else None
    if roots:
        found = [(root, path) for root in map(Path, roots) for path in root.rglob("*.py")]
        return [(path.relative_to(root).as_posix(), path) for root, path in found]
    if file is None:
        raise CoverageError(
            f"the sources of module `{name}` are nowhere to be found",
            expected="a module made of Python files",
            next_step="put the functions that are jitted into a file",
        )
    path = Path(file)
    if "site-packages" in path.parts:
        return [(path.name, path)]
    # It may import its neighbours: better a trace too many than a stale executable.
    return [(other.name, other) for other in path.parent.glob("*.py")]
