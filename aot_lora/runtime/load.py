"""Loads a plan's executables: every check before the bytes reach XLA, on all cores."""

from __future__ import annotations

import gc
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from aot_lora import _jax_compat
from aot_lora.config import Config
from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec, usable_cores
from aot_lora.store import Entry, LocalStore
from aot_lora.store.coverage import check_coverage, check_header, find_manifest
from aot_lora.store.key import shorten
from aot_lora.store.warm import WarmIdentity


def load_all(config: Config, target: TargetSpec, device: Any) -> dict[str, Any]:
    """Every variant of the plan, loaded on `device`: variant name -> `jax.stages.Compiled`.

    Raises:
      CoverageError: the store has no warmup that fits, or one that lacks variants.
      IntegrityError: an artifact is missing, damaged, or another one than the manifest names.
      UnsupportedError: an artifact is for another kind or number of devices.
    """
    store = LocalStore(config.store_root)
    warm = WarmIdentity.of(config, target)
    manifest = find_manifest(store, warm, config)
    check_coverage(manifest, config.plan, where=str(store.manifest_path(warm.identity)))
    expected = shorten(warm.target_parts)
    if device.device_kind != expected["device kind"]:
        raise UnsupportedError(
            "this host has another device than the target's",
            where=str(target),
            expected=expected["device kind"],
            found=device.device_kind,
            next_step="name this device's topology in the config and warm up for it",
        )
    unique = {entry.key: entry for entry in manifest.entries}
    # One more than cores: while one waits for Python's lock the cores still load (10 % at 1,040).
    pool = ThreadPoolExecutor(usable_cores() + 1, thread_name_prefix="aot-lora-load")
    with _without_collecting(), pool as threads:
        loaded = threads.map(lambda e: _load(store, e, expected, device), unique.values())
        by_key = dict(zip(unique, loaded, strict=True))
    return {entry.variant: by_key[entry.key] for entry in manifest.entries}


@contextmanager
def _without_collecting() -> Generator[None]:
    """Holds Python's garbage collector off while many objects are made that all stay.

    Its full passes over everything that JAX imported were 15 % of loading 240 variants.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _load(store: LocalStore, entry: Entry, expected: Mapping[str, str], device: Any) -> Any:
    artifact = store.read_entry(entry)
    check_header(artifact.header, expected, where=str(store.artifact_path(entry.key)))
    return _jax_compat.load(artifact.raw(), artifact.header.signature, device)
