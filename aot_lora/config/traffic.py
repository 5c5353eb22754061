"""Reads request traces: CSV with a header, or JSON lines."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from aot_lora.errors import ConfigError
from aot_lora.plan.simulate import Traffic

# Names of each value, as public traces write them; the case does not matter. The first of each are
# those of Azure/AzurePublicDataset, the second ones those of OpenAI's usage object.
NAMES = {
    "prompt": ("contexttokens", "prompt_tokens", "input_tokens"),
    "output": ("generatedtokens", "completion_tokens", "output_tokens"),
    "time": ("timestamp", "time", "arrived_at"),
    "adapter": ("adapter", "adapter_id", "lora", "lora_id"),
}
_MOST_TOKENS = 2**31 - 1
_EPOCH = datetime(1970, 1, 1)

Row = tuple[int, Any, Any, Any, Any]
"""Line, and prompt, output, time, adapter as they stand there; None where a value is absent."""


def read_traffic(path: Path, *, timed: bool = True) -> Traffic:
    """Reads a trace.

    Args:
      path: the file. A first character `{` says JSON lines.
      timed: whether times are needed; without them all requests arrive at once.

    Raises:
      ConfigError: the file cannot be read, has fewer than two requests, or a value is missing,
        out of range or out of order; it names the line.
    """
    prompts, outputs, seconds, adapters = array("q"), array("q"), array("d"), array("q")
    numbers: dict[str, int] = {}
    last = float("-inf")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for line, prompt, output, time, adapter in _rows(file, path, timed):
                prompts.append(_tokens(prompt, "prompt", 1, path, line))
                outputs.append(_tokens(output, "output", 0, path, line))
                at = 0.0 if time is None else _seconds(time, path, line)
                if at < last:
                    raise ConfigError(
                        "a request before the one above it",
                        where=f"{path}:{line}",
                        expected="times that never fall",
                        found=str(time),
                        next_step="sort the trace by its times",
                    )
                last = at
                seconds.append(at)
                name = "" if adapter is None else str(adapter)
                adapters.append(numbers.setdefault(name, len(numbers)) if name else -1)
    except UnicodeDecodeError:
        raise ConfigError("not UTF-8 text", where=str(path)) from None
    except csv.Error as error:
        raise ConfigError(f"not valid CSV: {error}", where=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", where=str(path)) from None
    if len(prompts) < 2:
        raise ConfigError(
            f"a trace of {len(prompts)} requests",
            where=str(path),
            expected="at least 2: one half of them is held out",
            next_step="record more traffic, or write the buckets out",
        )
    times = np.asarray(seconds, np.float64)
    return Traffic(
        prompts=np.asarray(prompts, np.int64),
        outputs=np.asarray(outputs, np.int64),
        seconds=times - times[0],
        adapters=np.asarray(adapters, np.int64) if numbers else None,
    )


def _rows(file: Iterable[str], path: Path, timed: bool) -> Iterator[Row]:
    lines = iter(file)
    first = next(lines, "")
    if not first.strip():
        raise ConfigError(
            "an empty trace" if not first else "a trace without a header",
            where=str(path),
            expected="a CSV header such as TIMESTAMP,ContextTokens,GeneratedTokens, or JSON lines",
        )
    if first.lstrip().startswith("{"):
        return _json_rows(first, lines, path, timed)
    return _csv_rows(next(csv.reader([first])), lines, path, timed)


def _csv_rows(header: list[str], lines: Iterator[str], path: Path, timed: bool) -> Iterator[Row]:
    names = [name.strip().lower() for name in header]
    where = {kind: _found(kind, names) for kind in NAMES}
    _check_names({kind for kind, name in where.items() if name}, header, path, 1, timed)
    prompt, output, time, adapter = (
        -1 if where[kind] is None else names.index(str(where[kind])) for kind in NAMES
    )
    reader = csv.reader(lines)
    for row in reader:
        line = reader.line_num + 1
        if len(row) == len(names):
            yield (
                line,
                row[prompt],
                row[output],
                row[time] if time >= 0 else None,
                row[adapter] if adapter >= 0 else None,
            )
        elif row:
            raise ConfigError(
                "a row that does not match the header",
                where=f"{path}:{line}",
                expected=f"{len(names)} values",
                found=f"{len(row)}",
            )


def _json_rows(first: str, lines: Iterator[str], path: Path, timed: bool) -> Iterator[Row]:
    line, text = 1, first
    while text:
        if text.strip():
            try:
                value = json.loads(text)
            except ValueError as error:
                raise ConfigError(f"not valid JSON: {error}", where=f"{path}:{line}") from None
            except RecursionError:
                raise ConfigError("nested too deeply", where=f"{path}:{line}") from None
            if not isinstance(value, dict):
                raise ConfigError(
                    "not a request",
                    where=f"{path}:{line}",
                    expected='an object such as {"prompt_tokens": 37, "output_tokens": 5}',
                    found=type(value).__name__,
                )
            row: dict[str, Any] = {str(key).lower(): item for key, item in value.items()}
            where = {kind: _found(kind, row) for kind in NAMES}
            _check_names({k for k, name in where.items() if name}, list(row), path, line, timed)
            found = [None if name is None else row[name] for name in where.values()]
            yield (line, *found)  # pyright: ignore[reportReturnType]
        line, text = line + 1, next(lines, "")


def _found(kind: str, names: Iterable[str]) -> str | None:
    return next((name for name in NAMES[kind] if name in names), None)


def _check_names(found: set[str], names: list[str], path: Path, line: int, timed: bool) -> None:
    for kind in ("prompt", "output", *(["time"] if timed else [])):
        if kind not in found:
            raise ConfigError(
                f"no {kind} {'of each request' if kind == 'time' else 'tokens'}",
                where=f"{path}:{line}",
                expected="one of " + ", ".join(NAMES[kind]),
                found=", ".join(names)[:120],
                next_step="add it; without times only prompts can be fitted, not steps"
                if kind == "time"
                else None,
            )


def _tokens(value: Any, kind: str, least: int, path: Path, line: int) -> int:
    try:
        count = int(value) if isinstance(value, str) else value
    except ValueError:
        count = None
    if type(count) is not int or not least <= count <= _MOST_TOKENS:
        raise ConfigError(
            f"bad {kind} tokens",
            where=f"{path}:{line}",
            expected=f"an integer from {least} to {_MOST_TOKENS:,}",
            found=repr(value)[:60] if value not in (None, "") else "nothing",
            next_step="remove the request, or mend it",
        )
    return count


def _seconds(value: Any, path: Path, line: int) -> float:
    try:
        if isinstance(value, str) and "-" in value[1:] and ":" in value:
            at = datetime.fromisoformat(value)
            # Without a zone the clock of this host must not matter, nor its summer time.
            found = at.timestamp() if at.tzinfo else (at - _EPOCH).total_seconds()
        else:
            found = float(value)
        if not isinstance(value, bool) and abs(found) < 1e15:
            return found
    except (TypeError, ValueError, OverflowError):
        pass
    raise ConfigError(
        "bad time",
        where=f"{path}:{line}",
        expected="seconds, or a date such as 2023-11-16 18:15:46.68",
        found=repr(value)[:60] if value not in (None, "") else "nothing",
    )
