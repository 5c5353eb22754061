"""The lock: fingerprints and signatures, one line per variant, checked in beside the config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from aot_lora.errors import CheckFailed, ConfigError

FORMAT = 2
AROUND = "(around)"
"""The name of what is no kernel, beside those of kernels."""
TORCH_XLA = "torch_xla "
"""What the names of targets of that backend begin with."""


class LockLine(BaseModel):
    """What a variant's trace must be.

    Args:
      fingerprint: of all of it.
      signature: in one line.
      kernels: digests by name, of what is around them too; empty for a program without kernels.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fingerprint: str
    signature: str
    kernels: dict[str, str] = {}

    def __hash__(self) -> int:
        return hash(self.fingerprint)  # A dict has none.


Traces = Mapping[str, Mapping[str, LockLine]]


class Lock(BaseModel):
    """The file.

    Args:
      format: of the file.
      plan: the digest of the plan it was written for.
      jax: the version whose traces these are. Another version may well make the same.
      options: of JAX that traces depend on, from the environment; mostly none.
      traces: target -> variant -> line.
      beside: release series of JAX (``0.12``) -> the lines that it makes other ones of.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    format: int
    plan: str
    jax: str = ""
    options: str = ""
    traces: dict[str, dict[str, LockLine]]
    beside: dict[str, dict[str, dict[str, LockLine]]] = {}

    def under(self, jax: str) -> dict[str, dict[str, LockLine]]:
        """The lines that hold under a version of JAX."""
        own = self.beside.get(series_of(jax), {})
        return {target: {**lines, **own.get(target, {})} for target, lines in self.traces.items()}

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


def series_of(jax: str) -> str:
    """The release series of a version: ``0.12`` of ``0.12.0.1``."""
    return ".".join(jax.split(".")[:2])


def dump_lock(
    traces: Traces,
    *,
    plan: str,
    jax: str = "",
    options: str = "",
    beside: Mapping[str, Traces] | None = None,
) -> str:
    """The text of a lock file: JSON, sorted, one line per variant.

    Args:
      traces, plan, jax, options, beside: as of a `Lock`.
    """
    parts = [
        f'"format": {FORMAT}',
        f'"plan": {json.dumps(plan)}',
        *([f'"jax": {json.dumps(jax)}'] if jax else []),
        *([f'"options": {json.dumps(options)}'] if options else []),
        f'"traces": {_sections(traces, 1)}',
    ]
    if beside:
        series = [f"  {json.dumps(name)}: {_sections(beside[name], 2)}" for name in sorted(beside)]
        parts.append('"beside": {\n' + ",\n".join(series) + "\n }")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _sections(traces: Traces, depth: int) -> str:
    indent = " " * depth
    sections: list[str] = []
    for target in sorted(traces):
        lines = [
            f"{indent}  {json.dumps(name)}: "
            + json.dumps(traces[target][name].model_dump(exclude_defaults=True))
            for name in sorted(traces[target])
        ]
        sections.append(
            f"{indent} {json.dumps(target)}: {{\n" + ",\n".join(lines) + f"\n{indent} }}"
        )
    return "{\n" + ",\n".join(sections) + f"\n{indent}}}"


class _TwiceError(ValueError):
    pass


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise _TwiceError(next(name for name in names if names.count(name) > 1))
    return found


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
        value = json.loads(text, object_pairs_hook=_unique)
    except json.JSONDecodeError as error:
        what = "has conflict markers" if "<<<<<<<" in text else f"is no JSON: {error.msg}"
        raise ConfigError(
            f"the lock {what}" if text.strip() else "the lock is empty",
            where=f"{path}:{error.lineno}:{error.colno}",
            next_step=step,
        ) from None
    except _TwiceError as error:
        raise ConfigError(
            "the lock has a line twice, as after a merge",
            where=str(path),
            found=f"two of {error}",
            next_step=step,
        ) from None
    found = value.get("format") if isinstance(value, dict) else None
    if found != format:
        raise ConfigError(
            "the lock has another format",
            where=str(path),
            expected=f"format {format}",
            found=f"format {found}",
            next_step=f"write it anew with `{writer}`: it fingerprints otherwise"
            if isinstance(found, int) and found < format
            else f"use the aot-lora that wrote it, or write it anew with `{writer}`",
        )
    try:
        return model.model_validate(value)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ConfigError(
            "the lock is not valid", where=f"{path}: {place}", found=problem["msg"], next_step=step
        ) from None
