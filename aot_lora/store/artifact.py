"""One executable in one file: magic, header, payload, digest. No pickle.

8 bytes   magic
4 bytes   format number, little endian
4 bytes   length of the header in bytes, little endian
...       header: JSON in UTF-8
...       payload: the executable's raw PJRT bytes, compressed with zstd
32 bytes  SHA-256 of everything before
"""

from __future__ import annotations

import hashlib
import struct
import sys
from dataclasses import dataclass

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from aot_lora.errors import IntegrityError
from aot_lora.signature import Signature

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FORMAT = 1
_MAGIC = b"AOT-LORA"
_PREFIX = struct.Struct("<8sII")
_DIGEST_BYTES = hashlib.sha256().digest_size
_LEVEL = 3


@checked(frozen=True, slots=True, kw_only=True, config=ConfigDict(extra="forbid", strict=True))
class Header:
    """What stands before the payload.

    Args:
      variant: the variant it was compiled for first; others may share the executable.
      parts: the parts of its key, long values as digests.
      signature: how to call it.
      raw_bytes: size of the payload once decompressed.
    """

    variant: str
    parts: dict[str, str]
    signature: Signature
    raw_bytes: int


_HEADERS = TypeAdapter(Header)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact:
    """A file's content, checked: whole, of this format, with a valid header."""

    header: Header
    payload: bytes
    digest: str
    file_bytes: int

    def raw(self) -> bytes:
        """The executable's PJRT bytes.

        Raises:
          IntegrityError: the payload is not of the size that the header names.
        """
        raw = zstd.decompress(self.payload)
        if len(raw) != self.header.raw_bytes:
            found = f"{len(raw)} bytes, not {self.header.raw_bytes}"
            raise _damaged(self.header.variant, "its payload has another size", found)
        return raw


def pack(header: Header, raw: bytes) -> bytes:
    """The bytes of an artifact file."""
    text = _HEADERS.dump_json(header)
    body = _PREFIX.pack(_MAGIC, FORMAT, len(text)) + text + zstd.compress(raw, _LEVEL)
    return body + hashlib.sha256(body).digest()


def digest_of(data: bytes) -> str:
    """The digest that an artifact file carries at its end, as hex; not checked."""
    return data[-_DIGEST_BYTES:].hex()


def check(data: bytes, *, where: str) -> None:
    """Checks that an artifact file is whole.

    Raises:
      IntegrityError: truncated, empty, or a byte differs from what was written.
    """
    if len(data) < _PREFIX.size + _DIGEST_BYTES:
        raise _damaged(where, "it is truncated", f"{len(data)} bytes")
    view = memoryview(data)
    found = hashlib.sha256(view[:-_DIGEST_BYTES]).digest()
    if found != data[-_DIGEST_BYTES:]:
        raise _damaged(where, "its bytes are not what was written", f"SHA-256 {found.hex()[:16]}…")


def unpack(data: bytes, *, where: str) -> Artifact:
    """Checks and splits an artifact file.

    Raises:
      IntegrityError: damaged, not an artifact, or of another format.
    """
    check(data, where=where)
    magic, number, header_bytes = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise _damaged(where, "it is not an artifact", repr(magic))
    if number != FORMAT:
        raise _damaged(where, f"its format is {number}, not {FORMAT}", "another version's file")
    start = _PREFIX.size + header_bytes
    try:
        header = _HEADERS.validate_json(data[_PREFIX.size : start])
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise _damaged(where, "its header is not valid", str(problem["msg"])) from None
    return Artifact(
        header=header,
        payload=data[start:-_DIGEST_BYTES],
        digest=digest_of(data),
        file_bytes=len(data),
    )


def _damaged(where: str, problem: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"the artifact cannot be used: {problem}",
        where=where,
        found=found,
        next_step="run `aot-lora warmup` with the same config: it rebuilds this file",
    )
