"""Keeps an executable: what is stored and whole is taken, anything else is compiled and written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from aot_lora.errors import IntegrityError
from aot_lora.signature import Signature
from aot_lora.store import artifact as artifacts
from aot_lora.store.key import key_of, shorten
from aot_lora.store.local import LocalStore
from aot_lora.store.manifest import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """An executable that is in the store now.

    Args:
      entry: its artifact.
      compiled: whether it had to be.
      set_aside: where a damaged artifact of its key went, or None.
    """

    entry: Entry
    compiled: bool
    set_aside: Path | None


def keep(
    store: LocalStore,
    variant: str,
    parts: Mapping[str, str],
    compile_raw: Callable[[], tuple[bytes, Signature]],
) -> Kept:
    """Makes sure that the executable of these parts is stored.

    Args:
      store: where.
      variant: its name.
      parts: of its key.
      compile_raw: called where it is missing or damaged; returns its PJRT bytes and how to call it.

    Raises:
      StoreError: it cannot be written.
    """
    key = key_of(parts)
    aside: Path | None = None
    try:
        found = store.read(key)
    except IntegrityError:
        aside = store.set_aside(key)
    else:
        entry = Entry(variant=variant, key=key, digest=found.digest, bytes=found.file_bytes)
        return Kept(entry=entry, compiled=False, set_aside=None)
    raw, signature = compile_raw()
    header = artifacts.Header(
        variant=variant, parts=shorten(parts), signature=signature, raw_bytes=len(raw)
    )
    data = store.write_artifact(key, artifacts.pack(header, raw))
    entry = Entry(variant=variant, key=key, digest=artifacts.digest_of(data), bytes=len(data))
    return Kept(entry=entry, compiled=True, set_aside=aside)
