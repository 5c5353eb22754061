"""The files of an adapter's folder, opened once and never trusted."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aot_lora.adapters.naming import shown
from aot_lora.errors import AdapterError, DamagedAdapterError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLED = "adapter_model.bin"


def check_folder(folder: Path) -> None:
    """Refuses what is not an adapter's folder, and says what it is instead.

    Raises:
      AdapterError: no folder, an empty one, a base model, or weights only as a pickle.
      DamagedAdapterError: one of the two files is missing.
    """
    where = str(folder)
    expected = f"a folder with {CONFIG} and {WEIGHTS}"
    try:
        names = set(os.listdir(folder))  # noqa: PTH208  names suffice, and bytes may be anything
    except FileNotFoundError:
        raise AdapterError("no such folder", where=where, expected=expected) from None
    except NotADirectoryError:
        raise AdapterError("not a folder", where=where, expected=expected) from None
    except (OSError, ValueError) as error:
        raise DamagedAdapterError(f"cannot be read: {reason(error)}", where=where) from None
    if not names:
        raise AdapterError("an empty folder", where=where, expected=expected)
    if CONFIG not in names and WEIGHTS not in names and PICKLED not in names:
        base = any(n == "config.json" or n.startswith(("model.", "model-")) for n in names)
        raise AdapterError(
            "a base model, not an adapter" if base else "no adapter in this folder",
            where=where,
            expected=expected,
            found=", ".join(shown(name) for name in sorted(names)[:4]),
            next_step="name the folder that PEFT's save_pretrained wrote",
        )
    if WEIGHTS not in names and PICKLED in names:
        raise AdapterError(
            f"its weights are a pickle, {PICKLED}, which is never loaded: it can run any code",
            where=where,
            expected=WEIGHTS,
            next_step="save it again with save_pretrained(..., safe_serialization=True)",
        )
    for name in (CONFIG, WEIGHTS):
        if name not in names:
            raise DamagedAdapterError(
                f"{name} is missing",
                where=where,
                expected=expected,
                next_step="copy the adapter again, with all its files",
            )


@contextmanager
def opened(path: Path) -> Generator[tuple[int, os.stat_result]]:
    """A regular file's descriptor and its stat. Never waits for the writer of a pipe.

    Raises:
      DamagedAdapterError: it cannot be opened, or is no regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        problem = "a link to nothing" if path.is_symlink() else "is missing"
        raise DamagedAdapterError(problem, where=str(path)) from None
    except OSError as error:
        raise DamagedAdapterError(f"cannot be read: {reason(error)}", where=str(path)) from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
            raise DamagedAdapterError("not a regular file", where=str(path), found=kind)
        yield fd, status
    finally:
        os.close(fd)


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """What changes when a file is written again or replaced."""
    return status.st_size, status.st_mtime_ns, status.st_ino


def read_at(fd: int, size: int, offset: int, *, where: str) -> bytes:
    """`size` bytes at `offset`.

    Raises:
      DamagedAdapterError: the file is shorter, or cannot be read.
    """
    data = bytearray(size)
    read_into(fd, memoryview(data), offset, where=where)
    return bytes(data)


def read_into(fd: int, buffer: memoryview, offset: int, *, where: str) -> None:
    """Fills `buffer`, one of bytes, from `offset` of the file.

    Raises:
      DamagedAdapterError: the file is shorter, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            count = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise DamagedAdapterError(f"cannot be read: {reason(error)}", where=where) from None
        if count == 0:
            raise DamagedAdapterError(
                "the file ends early",
                where=where,
                expected=f"{len(buffer)} bytes at {offset}",
                found=f"{done}",
                next_step="copy the adapter again",
            )
        done += count


def parse_json(data: bytes, *, where: str, unique: bool = False) -> dict[str, Any]:
    """A JSON object, NaN and its like refused.

    Args:
      data: UTF-8 text; where: the file.
      unique: refuse a name that stands twice in one object.

    Raises:
      DamagedAdapterError: it is not that.
    """

    def constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        value = dict(pairs)
        if unique and len(value) < len(pairs):
            raise ValueError("the same name twice in one object")
        return value

    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, parse_constant=constant, object_pairs_hook=once)
    except json.JSONDecodeError as error:
        place = f"{where}:{error.lineno}:{error.colno}"
        raise DamagedAdapterError(f"not valid JSON: {error.msg}", where=place) from None
    except (ValueError, RecursionError) as error:
        problem = shown(str(error)) if isinstance(error, ValueError) else "nested too deeply"
        raise DamagedAdapterError(f"not valid JSON: {problem}", where=where) from None
    if not isinstance(value, dict):
        raise DamagedAdapterError(
            "not a JSON object", where=where, found=f"a {type(value).__name__}"
        )
    return value


def reason(error: Exception) -> str:
    """What the system says, without the path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
