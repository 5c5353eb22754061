"""The manifest: a plan's variants and their artifacts. Written last."""

from __future__ import annotations

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from aot_lora.errors import IntegrityError

FORMAT = 1
_STRICT = ConfigDict(extra="forbid", strict=True)


@checked(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Entry:
    """One variant's artifact.

    Args:
      variant: the variant's name.
      key: the artifact's key.
      digest: SHA-256 that the file must have, as hex.
      bytes: size of the file.
      seconds: of one worker, from its trace to its file; None where another warmup compiled it.
    """

    variant: str
    key: str
    digest: str
    bytes: int
    seconds: float | None = None


@checked(frozen=True, slots=True, kw_only=True, config=_STRICT)
class Manifest:
    """A complete warmup.

    Args:
      format: of this file.
      config: the config's file name, for people.
      parts: the identity of the warmup by named part; its hash is the file's name.
      entries: every variant of the plan, in the plan's order.
    """

    format: int
    config: str
    parts: dict[str, str]
    entries: tuple[Entry, ...]


_MANIFESTS = TypeAdapter(Manifest)
_ENTRIES = TypeAdapter(Entry)


def dump_manifest(manifest: Manifest) -> bytes:
    """The bytes of a manifest file: JSON."""
    return _MANIFESTS.dump_json(manifest, indent=1) + b"\n"


def parse_manifest(data: bytes, *, where: str) -> Manifest:
    """Reads a manifest file.

    Raises:
      IntegrityError: not a manifest of this format.
    """
    try:
        manifest = _MANIFESTS.validate_json(data)
    except ValidationError as error:
        found = str(error.errors(include_url=False)[0]["msg"])
    else:
        if manifest.format == FORMAT:
            return manifest
        found = f"format {manifest.format}, not {FORMAT}"
    raise IntegrityError(
        "the manifest cannot be read",
        where=where,
        found=found,
        next_step="run `aot-lora warmup` with the same config: it writes a new one",
    )


def dump_entry(entry: Entry) -> bytes:
    """One line of a journal; it starts afresh after a line that a kill cut short."""
    return b"\n" + _ENTRIES.dump_json(entry)


def parse_journal(data: bytes) -> tuple[Entry, ...]:
    """The entries of a journal; a line cut short by a kill is left out."""
    entries: list[Entry] = []
    for line in data.splitlines():
        try:
            entries.append(_ENTRIES.validate_json(line))
        except ValidationError:
            continue
    return tuple(entries)
