"""Recordings in a store: a manifest per name, sources and target."""

from __future__ import annotations

from collections.abc import Mapping

from aot_lora.errors import AotLoraError, CoverageError
from aot_lora.programs.modules import digested, module_digests
from aot_lora.store.key import differences
from aot_lora.store.local import LocalStore
from aot_lora.store.manifest import Manifest


def title(name: str) -> str:
    """What stands for the config's file name in a recording's manifest."""
    return f"recording {name}"


def find_recording(store: LocalStore, name: str, parts: Mapping[str, str]) -> Manifest:
    """The newest recording of this name whose sources and target are those of this process.

    Args:
      store: where.
      name: of the recording.
      parts: the identity but for the sources, which each manifest names.

    Raises:
      CoverageError: there is none; it lists the parts that differ from the nearest one.
    """
    misses: list[list[str]] = []
    for manifest in store.manifests().values():
        if manifest.config != title(name):
            continue
        try:
            here = {**parts, **module_digests(digested(manifest.parts))}
        except AotLoraError as error:
            misses.append([error.problem])
            continue
        lines = differences(here, manifest.parts)
        if not lines:
            return manifest
        misses.append(lines)
    found = "no recording of this name"
    if misses:
        found = "a recording that differs in\n    " + "\n    ".join(min(misses, key=len))
    raise CoverageError(
        f"the store has no recording `{name}` that fits this process",
        where=str(store.root),
        expected="the same sources, versions, flags and devices as at the recording",
        found=found,
        next_step=f"record again: aot_lora.recording({name!r}), or AOT_LORA_JIT=record:{name}",
    )
