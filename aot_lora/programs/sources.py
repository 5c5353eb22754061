"""Which source files the programs of a plan depend on, without importing any. No jax here."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from aot_lora.errors import ConfigError, ProgramError
from aot_lora.plan import Plan, UserEntry

_PACKAGE = Path(__file__).resolve().parent.parent
# Whatever has a say in what is traced, compiled or written. A change costs traces, not compiles.
_OWN = (
    *("kernels/**/*.py", "lowering/*.py", "programs/*.py", "targets/*.py", "_jax_compat/*.py"),
    *("interop/*.py", "*.py"),
)


def source_digests(plan: Plan, *, config: Path, extra: tuple[str, ...]) -> dict[str, str]:
    """SHA-256 of the sources behind a plan's programs, by part.

    Args:
      plan: the plan; user modules count with the whole top-level package they live in.
      config: the config's file; user modules and `extra` are looked for beside it.
      extra: globs of further files that user programs depend on.

    Raises:
      ProgramError: a user module does not exist; ConfigError: a glob matches nothing.
    """
    digests = {"source of aot_lora": own_digest()}
    for entry in plan.user:
        module = entry.entry.partition(":")[0]
        name = module if is_own(module) else module.partition(".")[0]
        digests[f"source of {name}"] = digest_files(source_files(entry, config=config))
    folder = config.absolute().parent
    for glob in extra:
        matches = sorted(path for path in folder.glob(glob) if path.is_file())
        if not matches:
            raise ConfigError(f"sources: `{glob}` matches no file", where=str(config))
        digests[f"source {glob}"] = digest_files(
            (path.relative_to(folder).as_posix(), path) for path in matches
        )
    return digests


def own_digest() -> str:
    """SHA-256 of those files of aot-lora that have a say in what is traced or compiled."""
    own = [(p.relative_to(_PACKAGE), p) for glob in _OWN for p in _PACKAGE.glob(glob)]
    return digest_files((path.as_posix(), file) for path, file in own)


def search_path(config: Path) -> list[str]:
    """Where modules are looked for: the config's folder, the current one, then `sys.path`."""
    return [str(config.absolute().parent), str(Path.cwd()), *sys.path]


def source_files(entry: UserEntry, *, config: Path) -> list[tuple[str, Path]]:
    """The Python files that an entry may depend on, without importing it.

    They are all of its top-level package, or for a single file all in its folder. Anything else
    that it imports is the user's to name, with `sources:`. Of aot-lora's own steps they are the
    package within it and the plan's sources, beside what every plan's identity holds anyway.

    Returns:
      (name from the top-level package on, file), the same wherever that is installed.

    Raises:
      ProgramError: there is no such module.
    """
    module = entry.entry.partition(":")[0]
    if is_own(module):
        return _own_files(module)
    top = module.partition(".")[0]
    spec = find_top(top, config=config)
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ProgramError(
            f"no module `{top}`",
            where=f"programs: {entry.entry}",
            expected="a module beside the config, in the current folder or on the Python path",
            next_step="check the spelling, or install the package that holds it",
        )
    if spec.submodule_search_locations:
        roots = [Path(root) for root in spec.submodule_search_locations]
        return [(p.relative_to(root).as_posix(), p) for root in roots for p in root.rglob("*.py")]
    file = Path(str(spec.origin))
    if str(file.parent) not in search_path(config)[:2]:
        return [(file.name, file)]
    # It may import its neighbours: better a trace too many than a stale executable.
    return [(path.name, path) for path in file.parent.glob("*.py")]


def is_own(module: str) -> bool:
    """Whether a module is aot-lora's: then it is the running one's, whatever stands elsewhere."""
    return module.partition(".")[0] == _PACKAGE.name


def _own_files(module: str) -> list[tuple[str, Path]]:
    parts = module.split(".")[1:2] or ["*"]
    found = [p for glob in (f"{parts[0]}.py", f"{parts[0]}/**/*.py") for p in _PACKAGE.glob(glob)]
    if not found:
        raise ProgramError(
            f"aot-lora has no module `{module}`",
            where=f"programs: {module}",
            next_step="check the spelling",
        )
    return [(p.relative_to(_PACKAGE).as_posix(), p) for p in {*found, *_PACKAGE.glob("plan/*.py")}]


def find_top(name: str, *, config: Path) -> ModuleSpec | None:
    """Where a top-level module would be imported from, without importing it."""
    found = PathFinder.find_spec(name, search_path(config))
    return found or importlib.util.find_spec(name)  # editable installs have finders of their own


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """SHA-256 over names and bytes of (name, file) pairs, in the names' order."""
    digest = hashlib.sha256()
    for name, path in sorted(files):
        body = path.read_bytes()
        digest.update(f"{len(name)}:{name}:{len(body)}:".encode())
        digest.update(body)
    return digest.hexdigest()
