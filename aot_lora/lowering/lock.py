"""The lock: fingerprints and signatures, one line per variant, checked in beside the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from aot_lora.errors import CheckFailed, ConfigError

FORMAT = 1
TORCH_XLA = "torch_xla "
"""What the names of targets of that backend begin with."""


class LockLine(BaseModel):
    """What a variant's trace must be."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fingerprint: str
    signature: str


Traces = Mapping[str, Mapping[str, LockLine]]


class Lock(BaseModel):
    """The file: the digest of the plan it was written for, and target -> variant -> line."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    plan: str
    traces: dict[str, dict[str, LockLine]]

    def of(self, *, torch_xla: bool) -> Lock:
        """The lock of one backend: neither knows whether the other's traces still hold."""
        return self.model_copy(
            update={
                "traces": {
                    target: lines
                    for target, lines in self.traces.items()
                    if target.startswith(TORCH_XLA) == torch_xla
                }
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A variant whose trace is not the locked one."""

    name: str
    locked: LockLine
    now: LockLine

    @property
    def cause(self) -> str:
        """Which of the two moved."""
        if self.locked.signature != self.now.signature:
            return (
                f"signature\n      lock: {self.locked.signature}\n      now:  {self.now.signature}"
            )
        return f"code moved, signature did not ({self.now.signature})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Names are ``target variant``.

    Args:
      stable: as locked.
      moved: traced to something else.
      missing: in the plan that the lock was written for, but not in the lock.
      new: in today's plan, which is not the one the lock was written for, but not in the lock.
      stale: in the lock, but not in the plan.
    """

    stable: tuple[str, ...]
    moved: tuple[Moved, ...]
    missing: tuple[str, ...]
    new: tuple[str, ...]
    stale: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether the lock and the traces agree."""
        return not (self.moved or self.missing or self.new or self.stale)


def compare(
    lock: Lock, traces: Traces, *, plan: str, untraced: frozenset[str] = frozenset()
) -> Comparison:
    """Compares a lock with the traces of a plan.

    Args:
      lock: the lock.
      traces: target -> variant -> line.
      plan: the plan's digest.
      untraced: names of variants that could not be traced: neither stable nor stale.
    """
    locked = _flat(lock.traces)
    now = _flat(traces)
    absent = tuple(name for name in now if name not in locked)
    same_plan = lock.plan == plan
    shared = [name for name in now if name in locked]
    return Comparison(
        stable=tuple(name for name in shared if now[name] == locked[name]),
        moved=tuple(
            Moved(name=name, locked=locked[name], now=now[name])
            for name in shared
            if now[name] != locked[name]
        ),
        missing=absent if same_plan else (),
        new=() if same_plan else absent,
        stale=tuple(name for name in locked if name not in now and name not in untraced),
    )


def _flat(traces: Traces) -> dict[str, LockLine]:
    return {
        f"{target} {name}": line for target, lines in traces.items() for name, line in lines.items()
    }


def dump_lock(traces: Traces, *, plan: str) -> str:
    """The text of a lock file: JSON, sorted, one line per variant."""
    sections: list[str] = []
    for target in sorted(traces):
        lines = [
            f"   {json.dumps(name)}: {json.dumps(traces[target][name].model_dump())}"
            for name in sorted(traces[target])
        ]
        sections.append(f"  {json.dumps(target)}: {{\n" + ",\n".join(lines) + "\n  }")
    body = ",\n".join(sections)
    return (
        f'{{\n "format": {FORMAT},\n "plan": {json.dumps(plan)},\n "traces": {{\n{body}\n }}\n}}\n'
    )


def read_lock(path: Path) -> Lock:
    """Reads a lock file.

    Raises:
      CheckFailed: there is none; ConfigError: it cannot be read or is of another format.
    """
    return read_as(Lock, path, format=FORMAT, writer="aot-lora check --update")


_Model = TypeVar("_Model", bound=BaseModel)


def read_as(model: type[_Model], path: Path, *, format: int, writer: str) -> _Model:
    """Reads a file of JSON that is checked in, of whatever kind.

    Args:
      model: what it has to be.
      path: the file.
      format: the number that stands in it.
      writer: the command that writes it.

    Raises:
      CheckFailed: there is none; ConfigError: it cannot be read or is of another format.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckFailed(
            "there is no lock",
            where=str(path),
            next_step=f"write it with `{writer}` and check it in",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the lock cannot be read: {error}", where=str(path)) from None
    step = f"mend it, or write it anew with `{writer}`"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        conflict = "<<<<<<<" in text
        raise ConfigError(
            "the lock has conflict markers" if conflict else f"the lock is no JSON: {error.msg}",
            where=f"{path}:{error.lineno}:{error.colno}",
            next_step=step,
        ) from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != format:
        raise ConfigError(
            "the lock has another format",
            where=str(path),
            expected=f"format {format}",
            found=f"format {found}",
            next_step=f"use the aot-lora that wrote it, or write it anew with `{writer}`",
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            "the lock is not valid", where=f"{path}: {place}", found=problem["msg"], next_step=step
        ) from None
