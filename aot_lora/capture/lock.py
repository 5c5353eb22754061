"""The lock of a run: one line for each program that it compiled, to be checked in. No jax here."""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from aot_lora.capture.records import Recorded, Records, key
from aot_lora.errors import StoreError
from aot_lora.lowering.lock import read_as

FORMAT = 1
WRITER = "aot-lora capture -o"
_TYPE = r"^~?[^~\[\]]+\[[0-9,]*\]$"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class LockedArgument(_Strict):
    """As `described.call_fields` writes it."""

    name: str
    type: str = Field(pattern=_TYPE)
    kind: str = ""
    donated: bool = False
    sharding: str = ""


class Locked(_Strict):
    """A program. `count`: how often, at most, one process compiled it."""

    function: str
    arguments: list[LockedArgument] = []
    results: list[str] = []
    static: dict[str, str] = {}
    options: dict[str, str] = {}
    platform: str
    tree: str = ""
    fingerprint: str
    count: int = Field(ge=1)

    @property
    def fields(self) -> dict[str, Any]:
        """What was recorded of it; what is empty is left out."""
        return self.model_dump(exclude_defaults=True)


class CaptureLock(_Strict):
    """The file. `jax`: the versions that the run had."""

    format: int
    jax: list[str]
    compiles: list[Locked]

    @model_validator(mode="before")
    @classmethod
    def _is_of_a_run(cls, value: Any) -> Any:
        if isinstance(value, dict) and "traces" in value:
            raise ValueError(f"this is a config's lock; one that `{WRITER}` writes is needed")
        return value

    def counts(self) -> Mapping[str, int]:
        """How often each program may be compiled in a process, by `key`."""
        return {key(line.fields): line.count for line in self.compiles}


@dataclass(frozen=True, slots=True, kw_only=True)
class Unheld:
    """A program that a lock does not hold, or holds fewer times than it was compiled.

    Args:
      first: the first compile that the lock does not allow.
      count: compiles in the process with the most of them.
      allowed: by the lock.
    """

    first: Recorded
    count: int
    allowed: int


def lock_of(records: Records) -> CaptureLock:
    """The lock that holds what was recorded, and nothing else."""
    described: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for one in records.compiles:
        described[key(one.fields)].append(one.fields)
    most = _most(records.compiles)
    known = Locked.model_fields.keys()
    lines: list[Locked] = []
    for name, all_fields in described.items():
        # Two that are one program may differ in words only: which is first is chance.
        fields = min(all_fields, key=lambda fields: json.dumps(_without_place(fields)))
        kept = {part: value for part, value in fields.items() if part in known}
        lines.append(Locked.model_validate({**kept, "count": most[name]}))
    return CaptureLock(format=FORMAT, jax=list(records.jax), compiles=lines)


def dump(lock: CaptureLock) -> str:
    """The text of the file: JSON, sorted, one line a program."""
    lines = sorted(json.dumps(line.fields) for line in lock.compiles)
    body = ",\n".join(f"  {line}" for line in lines)
    compiles = f"[\n{body}\n ]" if lines else "[]"
    return (
        f'{{\n "format": {lock.format},\n "jax": {json.dumps(lock.jax)},\n'
        f' "compiles": {compiles}\n}}\n'
    )


def read(path: Path) -> CaptureLock:
    """Reads a lock.

    Raises:
      CheckFailed: there is none; ConfigError: it cannot be read, or is not one of a run.
    """
    return read_as(CaptureLock, path, format=FORMAT, writer=WRITER)


def write(lock: CaptureLock, path: Path) -> None:
    """Replaces the file at once.

    Raises:
      StoreError: it cannot be written.
    """
    try:
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(dump(lock), encoding="utf-8")
        new.replace(path)
    except OSError as error:
        raise StoreError(f"the lock cannot be written: {error.strerror}", where=str(path)) from None


def unheld(lock: CaptureLock, records: Records) -> tuple[Unheld, ...]:
    """What was compiled and is not in the lock, or not as often, in the order of the records."""
    counts, most = lock.counts(), _most(records.compiles)
    seen: Counter[tuple[str, str]] = Counter()
    found: dict[str, Unheld] = {}
    for one in records.compiles:
        name = key(one.fields)
        seen[one.process, name] += 1
        allowed = counts.get(name, 0)
        if seen[one.process, name] > allowed and name not in found:
            found[name] = Unheld(first=one, count=most[name], allowed=allowed)
    return tuple(found.values())


def _most(compiles: Iterable[Recorded]) -> dict[str, int]:
    """Of each program, the compiles in the process that had the most: how many processes do the
    same is no property of the program."""
    most: dict[str, int] = {}
    for (_, name), count in Counter((one.process, key(one.fields)) for one in compiles).items():
        most[name] = max(count, most.get(name, 0))
    return most


def _without_place(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {part: value for part, value in fields.items() if part in Locked.model_fields}
