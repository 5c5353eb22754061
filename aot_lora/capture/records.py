"""What the processes of a run have written, read back. No jax here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One compile.

    Args:
      fields: of `compiles.describe`.
      outcome: ``compiled``, ``cache hit`` (JAX's persistent cache), ``failed``, or ``unfinished``
        where the process ended before its compiler did.
      seconds: that it took; 0 for one that is unfinished.
      process: which, of those that were recorded.
    """

    fields: Mapping[str, Any]
    outcome: str
    seconds: float
    process: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Of a whole run.

    Args:
      compiles: by process, in the order in which they began.
      pythons: processes that ran a Python and were recorded.
      jax: versions of it that were imported.
      troubles: what could not be recorded, and why.
    """

    compiles: tuple[Recorded, ...]
    pythons: int
    jax: tuple[str, ...]
    troubles: tuple[str, ...]

    @property
    def obstacle(self) -> str:
        """Why nothing could be recorded; empty where something could."""
        if self.jax:
            return ""
        if self.troubles:
            return self.troubles[0]
        if self.pythons:
            return "no process imported jax"
        return (
            "no Python was seen: the command starts none, or one that ignores PYTHONPATH"
            " (python -I, -E or -S), or it clears the environment"
        )


# Options that show in what is compiled, and of which not every way to the compiler tells.
_IN_THE_TEXT = ("out_shardings", "in_layouts", "out_layouts", "ctx_mesh", "keep_unused")


def key(fields: Mapping[str, Any]) -> str:
    """Two compiles of the same key are of the same program for the same places."""
    shardings = [argument.get("sharding", "") for argument in fields.get("arguments", ())]
    options = {k: v for k, v in fields.get("options", {}).items() if k not in _IN_THE_TEXT}
    parts = [fields["fingerprint"], fields["platform"], shardings, options]
    return json.dumps(parts, sort_keys=True)


def read_records(folder: Path) -> Records:
    """Reads what a run has left, whatever has become of its processes."""
    compiles: list[Recorded] = []
    events: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        own = _events(path)
        events += own
        ends = {event["number"]: event for event in own if event["event"] == "end"}
        for event in own:
            if event["event"] == "begin":
                end = ends.get(event["number"], {"outcome": "unfinished", "seconds": 0.0})
                compiles.append(
                    Recorded(
                        fields={k: v for k, v in event.items() if k not in ("event", "number")},
                        outcome=end["outcome"],
                        seconds=end["seconds"],
                        process=path.stem,
                    )
                )
    return Records(
        compiles=tuple(compiles),
        pythons=sum(event["event"] == "python" for event in events),
        jax=tuple(sorted({event["version"] for event in events if event["event"] == "jax"})),
        troubles=tuple(dict.fromkeys(e["text"] for e in events if e["event"] == "trouble")),
    )


def _events(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError:  # Cut short by a full disk.
            continue
    return events
