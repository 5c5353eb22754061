"""The same config in another checkout, or as of a git revision: what its variants were."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from aot_lora.checking.child import hash_of
from aot_lora.checking.diff import diff
from aot_lora.checking.processes import PACKAGE, Request, run_all
from aot_lora.config import Config
from aot_lora.errors import AotLoraError, ConfigError
from aot_lora.lowering.canonical import canonical


def diffs_to(
    config: Config, base: str, names: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """How the canonical IR of variants differs from that of a base, both traced here and now.

    Args:
      config: the config of this checkout.
      base: a folder that holds another checkout, or a git revision.
      names: target -> variants.

    Returns:
      ``target variant`` -> the lines of a diff; none where both are the same, so that what moved
      them is the toolchain or an option. A variant that the base has not, or cannot trace, says so.

    Raises:
      ConfigError: there is no such base, or no config in it.
    """
    with (
        tempfile.TemporaryDirectory(prefix="aot-lora-base-") as work,
        _checkout(config, base, Path(work)) as (here, there),
    ):
        folders = [Path(work) / side for side in ("base-ir", "now-ir")]
        for folder in folders:
            folder.mkdir()
        path = there / config.path.absolute().relative_to(here)
        if not path.is_file():
            raise ConfigError("the base has no such config", where=f"--base {base}: {path.name}")
        old = Request(
            config=path,
            names=names,
            folder=folders[0],
            package=there if PACKAGE.parent == here else PACKAGE.parent,
            paths=_moved_paths(here, there),
            cwd=_moved(Path.cwd(), here, there),
        )
        new = Request(config=config.path, names=names, folder=folders[1], paths=(str(Path.cwd()),))
        before = run_all([old, new])[0]
        found: dict[str, tuple[str, ...]] = {}
        for target, variants in names.items():
            for variant in variants:
                name = f"{target} {variant}"
                file = f"{hash_of(target, variant)}.mlir"
                texts = [folder / file for folder in folders]
                if failure := before.failures.get(name):
                    found[name] = (f"the base cannot be traced: {failure.error.problem}",)
                elif not all(text.is_file() for text in texts):
                    found[name] = ("the base has no such variant",)
                else:
                    one, other = (
                        canonical(text.read_text(encoding="utf-8")).text for text in texts
                    )
                    found[name] = diff(one, other) if one != other else ()
        return found


@contextmanager
def _checkout(config: Config, base: str, work: Path) -> Generator[tuple[Path, Path]]:
    """The root of this checkout, and that of the base."""
    path = config.path.absolute()
    if Path(base).is_dir():
        folder = Path(base).resolve()
        roots = (one for one in path.parents if (folder / path.relative_to(one)).is_file())
        yield next(roots, path.parent), folder
        return
    root = Path(os.fsdecode(_git(path.parent, "rev-parse", "--show-toplevel").strip()))
    try:
        archive = _git(root, "archive", "--format=tar", base)
    except AotLoraError as error:
        raise ConfigError(
            "no such base",
            where=f"--base {base}",
            expected="a folder with another checkout, or a revision that this clone has",
            found=error.found,
            next_step="fetch it; a clone in CI may hold one commit only (fetch-depth: 0)",
        ) from None
    tree = work / "base"
    file = work / "base.tar"
    file.write_bytes(archive)
    with tarfile.open(file) as tar:
        tar.extractall(tree, filter="data")
    yield root, tree


def _git(folder: Path, *arguments: str) -> bytes:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, check=False
        )
    except OSError as error:
        raise ConfigError("git cannot be run", where="--base", found=str(error)) from None
    if done.returncode:
        raise ConfigError(
            "git refused",
            where=f"--base: git {arguments[0]}",
            found=done.stderr.decode(errors="replace").strip()[:300],
            next_step="give --base a folder instead, which holds the checkout to compare with",
        )
    return done.stdout


def _moved(path: Path, here: Path, there: Path) -> Path:
    moved = there / path.relative_to(here) if path.is_relative_to(here) else path
    return moved if moved.is_dir() else there


def _moved_paths(here: Path, there: Path) -> tuple[str, ...]:
    """The folders of this checkout that modules are imported from, in the base."""
    inside = (Path(path) for path in sys.path if path and Path(path).is_relative_to(here))
    moved = (there / path.relative_to(here) for path in inside)
    return (*(str(path) for path in moved if path.is_dir()), str(there))
