"""The header of a safetensors file: which tensors it holds, and where."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from aot_lora.adapters.files import opened, parse_json, read_at, reason, stamp_of
from aot_lora.adapters.naming import shown
from aot_lora.adapters.values import DTYPES, Tensor
from aot_lora.errors import AdapterError, DamagedAdapterError

_LARGEST_HEADER_BYTES = 2**23  # an adapter of 1,000 modules takes 0.3 MiB
_TAKEN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_REFUSED = {"F64": "float64", "I8": "int8", "U8": "uint8", "I16": "int16", "I32": "int32"} | {
    "I64": "int64",
    "F8_E4M3": "float8_e4m3",
    "F8_E5M2": "float8_e5m2",
    "BOOL": "bool",
}


def read_header(path: Path) -> tuple[dict[str, Any], int, tuple[int, int, int]]:
    """Reads the header of a whole safetensors file.

    Returns:
      The entries by key, where the data starts, and the file's stamp.

    Raises:
      DamagedAdapterError: it is no safetensors file, or not a whole one.
    """
    where = str(path)
    with opened(path) as (fd, status):
        if status.st_size < 8:
            raise _damaged("no safetensors file: too short for a header", where)
        (size,) = struct.unpack("<Q", read_at(fd, 8, 0, where=where))
        if size > min(_LARGEST_HEADER_BYTES, status.st_size - 8):
            raise _damaged(
                "no safetensors file, or cut short in its header",
                where,
                found=f"a header of {size:,} bytes in a file of {status.st_size:,}",
            )
        data = read_at(fd, size, 8, where=where)
        header = parse_json(data, where=f"{where} (header)", unique=True)
        _check_length(header, status.st_size - 8 - size, where)
        try:
            # The format's own reader has the last word: overlaps, holes, length.
            with safe_open(path, framework="numpy") as reader:  # pyright: ignore[reportUnknownVariableType]
                reader.keys()
        except (SafetensorError, OSError, ValueError) as error:
            raise _damaged(f"not a whole safetensors file: {shown(reason(error))}", where) from None
    header.pop("__metadata__", None)
    return header, 8 + size, stamp_of(status)


def _check_length(header: dict[str, Any], size: int, where: str) -> None:
    """Says how much is missing, where that is all that is wrong: the usual damage."""
    entries = (entry for key, entry in header.items() if key != "__metadata__")
    ends = [end for entry in entries for end in _offsets(entry)]
    if size < (expected := max(ends, default=0)):
        raise _damaged(
            "the file is cut short, or its header damaged",
            where,
            expected=f"{expected:,} bytes after the header",
            found=f"{size:,}",
        )


def _offsets(entry: Any) -> tuple[int, ...]:
    match entry:
        case {"data_offsets": [int(begin), int(end)]}:
            return (begin, end)
        case _:
            return ()


def tensor_of(key: str, entry: Any, *, start: int, size: int, where: str) -> Tensor:
    """The tensor of an entry of the header.

    Args:
      key: its name; entry: what the header says.
      start: where the data starts; size: of the file, in bytes.
      where: the file.

    Raises:
      AdapterError: a dtype or a shape that no LoRA weight has.
      DamagedAdapterError: its bytes are not where the header says.
    """
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(begin), int(end)]} if (
            all(type(length) is int and length >= 0 for length in shape)
        ):
            pass
        case _:
            raise _damaged(f"the header's entry for `{shown(key)}` is not valid", where)
    if dtype not in _TAKEN:
        raise AdapterError(
            f"`{shown(key)}` has dtype {_REFUSED.get(dtype, shown(dtype).lower())}",
            where=where,
            expected=", ".join(_TAKEN.values()),
            next_step="save the adapter in one of these",
        )
    if len(shape) != 2:
        raise AdapterError(
            f"`{shown(key)}` has {len(shape)} dimensions",
            where=where,
            expected="2: only LoRA of linear layers, none of experts or convolutions",
            found=shown(str(shape)),
        )
    if 0 in shape:
        raise AdapterError(
            f"`{shown(key)}` is empty",
            where=where,
            expected="a rank of at least 1",
            found=shown(str(shape)),
        )
    nbytes = math.prod(shape) * DTYPES[_TAKEN[dtype]].itemsize
    if end - begin != nbytes or not 0 <= begin <= end <= size - start:
        raise _damaged(f"`{shown(key)}` is not where the header says", where)
    rows, columns = shape
    return Tensor(
        key=key,
        dtype=_TAKEN[dtype],
        shape=(rows, columns),
        offset=start + begin,
        nbytes=nbytes,
    )


def _damaged(
    problem: str, where: str, *, expected: str | None = None, found: str | None = None
) -> DamagedAdapterError:
    return DamagedAdapterError(
        problem, where=where, expected=expected, found=found, next_step="copy the adapter again"
    )
