"""Loads a plan's executables: every check before the bytes reach XLA, on all cores."""

from __future__ import annotations

import gc
from collections.abc import Container, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from aot_lora import _jax_compat
from aot_lora._jax_compat.placement import load_at
from aot_lora.config import Config
from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec, Variant, usable_cores
from aot_lora.signature import Signature
from aot_lora.store import Entry, LocalStore
from aot_lora.store.coverage import check_header, find_entries
from aot_lora.store.key import shorten
from aot_lora.store.warm import WarmIdentity
from aot_lora.targets.cuda import check_gpus


class Loaded(NamedTuple):
    """A loaded executable.

    Args:
      executable: a `jax.stages.Compiled`.
      signature: what it was traced with.
    """

    executable: Any
    signature: Signature


def load_all(
    config: Config, target: TargetSpec, devices: Sequence[Any], *, held: Container[Variant] = ()
) -> dict[Variant, Loaded]:
    """The variants of the plan, loaded on this host's devices.

    Args:
      config: under another policy than ``error``, variants may be missing from its store.
      target: what they were compiled for.
      devices: of this host, in the order of the mesh.
      held: variants that need no loading.

    Raises:
      CoverageError: the store has no warmup that fits, or one that lacks variants.
      IntegrityError: an artifact is missing, damaged, or another one than the manifest names.
      UnsupportedError: an artifact is for another kind or number of devices.
    """
    store = LocalStore(config.store_root)
    warm = WarmIdentity.of(config, target)
    entries = find_entries(store, warm, config)
    expected = shorten(warm.target_parts)
    if devices[0].device_kind != expected["device kind"]:
        raise UnsupportedError(
            "this host has another device than the target's",
            where=str(target),
            expected=expected["device kind"],
            found=devices[0].device_kind,
            next_step="name this device's topology in the config and warm up for it",
        )
    check_gpus(target, devices)
    wanted = [v for v in config.plan.variants if v.name in entries and v not in held]
    unique = {entries[variant.name].key: entries[variant.name] for variant in wanted}
    # One more than cores: while one waits for Python's lock the cores still load (10 % at 1,040).
    pool = ThreadPoolExecutor(usable_cores() + 1, thread_name_prefix="aot-lora-load")
    with _without_collecting(), pool as threads:
        done = threads.map(lambda e: _load(store, e, expected, devices), unique.values())
        by_key = dict(zip(unique, done, strict=True))
    return {variant: by_key[entries[variant.name].key] for variant in wanted}


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


def _load(
    store: LocalStore, entry: Entry, expected: Mapping[str, str], devices: Sequence[Any]
) -> Loaded:
    artifact = store.read_entry(entry)
    check_header(artifact.header, expected, where=str(store.artifact_path(entry.key)))
    signature = artifact.header.signature
    if signature.placement is None:
        return Loaded(_jax_compat.load(artifact.raw(), signature, devices[0]), signature)
    return Loaded(load_at(artifact.raw(), signature, signature.placement, devices), signature)
