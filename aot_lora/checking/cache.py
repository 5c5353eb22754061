"""What was traced before, where nothing has changed that a trace depends on. No jax here."""

from __future__ import annotations

import hashlib
import json
import platform
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from aot_lora.checking.processes import Traced
from aot_lora.config import Config
from aot_lora.errors import AotLoraError
from aot_lora.lowering.lock import FORMAT, LockLine
from aot_lora.store.key import key_of
from aot_lora.store.local import write_atomic
from aot_lora.store.warm import WarmIdentity

_KEPT = 32  # files, of about 150 KB for 500 variants


class _Saved(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    lines: dict[str, dict[str, LockLine]]
    warnings: list[str]
    modules: dict[str, str]


class Cache:
    """Traces of one config in its store, by the identity of a warmup: plan, sources, versions.

    A user's program counts with its package and its `sources:`, as for a warmup; and here also with
    each file outside of an installation that was imported while it was traced.

    Args:
      config: the config.
    """

    def __init__(self, config: Config) -> None:
        self._path: Path | None = None
        with suppress(AotLoraError):  # No libtpu, say: it is not needed to trace.
            parts = {"config": str(config.path.absolute()), "python": platform.python_version()}
            parts["format of the lock"] = str(FORMAT)
            for target in config.targets:
                own = WarmIdentity.of(config, target).parts
                parts |= {f"{target}: {name}": value for name, value in own.items()}
            self._path = config.store_root / "checks" / f"{key_of(parts)}.json"

    def read(self) -> Traced | None:
        """What was traced; None where that is not known, or its file is damaged."""
        if self._path is None:
            return None
        try:
            digest, _, body = self._path.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return None
            saved = _Saved.model_validate_json(body)
            changed = (_digest(Path(p)) != expected for p, expected in saved.modules.items())
            if any(changed):
                return None
        except (OSError, ValidationError):
            return None
        warnings = tuple(saved.warnings)
        return Traced(lines=saved.lines, warnings=warnings, modules=saved.modules)

    def write(self, found: Traced) -> None:
        """Keeps traces; does nothing where some are missing, or the store cannot be written."""
        if self._path is None or found.failures:
            return
        saved = {
            "lines": {
                t: {n: line.model_dump() for n, line in v.items()} for t, v in found.lines.items()
            },
            "warnings": found.warnings,
            "modules": found.modules,
        }
        body = json.dumps(saved).encode()
        with suppress(AotLoraError, OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
            files = sorted(self._path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
            for file in files[:-_KEPT]:
                file.unlink(missing_ok=True)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
