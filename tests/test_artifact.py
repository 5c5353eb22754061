"""The artifact file: what is read is what was written, or an error that names the file."""

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aot_lora.errors import EXIT_INTEGRITY, IntegrityError
from aot_lora.signature import ArraySpec, Signature
from aot_lora.store import artifact as artifacts

GOLDEN = Path(__file__).parent / "golden" / "format-1.aot"
# Written out, not derived: what a file of format 1 has said since it was made.
HEADER = artifacts.Header(
    variant="lora_expand/t8-l8-o16",
    parts={"fingerprint": "0f" * 16, "device kind": "TPU v6 lite", "device count": "1"},
    signature=Signature(
        function="lora_expand",
        inputs=(
            ArraySpec(shape=(8, 16), dtype="bfloat16", name="base"),
            ArraySpec(shape=(), dtype="float32", weak_type=True, name="scale"),
        ),
        outputs=(ArraySpec(shape=(8, 16), dtype="bfloat16"),),
        donated=(0,),
        kept=(0,),
        in_tree="AAEC",
        out_tree="AwQF",
    ),
    raw_bytes=14,
)
RAW = b"not executable"
DATA = artifacts.pack(HEADER, RAW)

names = st.text(st.characters(exclude_categories=["Cs"]))
specs = st.builds(
    ArraySpec,
    shape=st.lists(st.integers(0, 2**40)).map(tuple),
    dtype=names,
    weak_type=st.booleans(),
    name=names,
)
positions = st.lists(st.integers(0, 99)).map(tuple)
signatures = st.builds(
    Signature,
    function=names,
    inputs=st.lists(specs, max_size=3).map(tuple),
    outputs=st.lists(specs, max_size=3).map(tuple),
    donated=positions,
    kept=positions,
    in_tree=names,
    out_tree=names,
)


def sealed(body: bytes) -> bytes:
    """`body` with the digest that makes it whole."""
    return body + hashlib.sha256(body).digest()


@settings(deadline=None)
@given(st.binary(), names, st.dictionaries(names, names), signatures)
def test_unpack_returns_what_was_packed(
    raw: bytes, variant: str, parts: dict[str, str], signature: Signature
) -> None:
    header = artifacts.Header(variant=variant, parts=parts, signature=signature, raw_bytes=len(raw))
    data = artifacts.pack(header, raw)
    artifact = artifacts.unpack(data, where="a.aot")

    assert (artifact.header, artifact.raw()) == (header, raw)
    assert artifact.digest == artifacts.digest_of(data)


def test_a_file_of_format_1_stays_readable() -> None:
    artifact = artifacts.unpack(GOLDEN.read_bytes(), where=str(GOLDEN))

    assert (artifact.header, artifact.raw()) == (HEADER, RAW)


def refusal(data: bytes) -> str:
    """The text of the error for `data`, which has to name the file and the way out."""
    with pytest.raises(IntegrityError) as caught:
        artifacts.unpack(data, where="store/ab/abc.aot")
    assert caught.value.where == "store/ab/abc.aot"
    assert caught.value.exit_code == EXIT_INTEGRITY
    assert "run `aot-lora warmup`" in str(caught.value)
    return caught.value.problem


def test_one_byte_changed_anywhere_is_seen() -> None:
    for position in range(len(DATA)):
        for bits in (1, 255):
            damaged = bytearray(DATA)
            damaged[position] ^= bits
            assert "its bytes are not what was written" in refusal(bytes(damaged)), position


def test_every_truncation_is_seen() -> None:
    for length in range(len(DATA)):
        assert "truncated" in refusal(DATA[:length]) or length >= 48, length


def test_bytes_added_are_seen() -> None:
    refusal(DATA + b"\0")


def test_another_format_is_named() -> None:
    body = bytearray(DATA[:-32])
    struct.pack_into("<I", body, 8, 2)

    assert "its format is 2, not 1" in refusal(sealed(bytes(body)))


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"GIF89a.." + DATA[8:-32], "it is not an artifact"),
        (DATA[:-32].replace(b'"variant"', b'"variety"'), "its header is not valid"),
        (DATA[:-32].replace(b'"raw_bytes":14', b'"raw_bytes":""'), "its header is not valid"),
        (DATA[:12] + struct.pack("<I", 2**32 - 1) + DATA[16:-32], "its header is not valid"),
        (DATA[:12] + struct.pack("<I", 0) + DATA[16:-32], "its header is not valid"),
    ],
    ids=["magic", "unknown field", "wrong type", "header too long", "no header"],
)
def test_a_whole_file_of_something_else_is_refused(body: bytes, problem: str) -> None:
    assert problem in refusal(sealed(body))


def test_the_digest_depends_on_the_header_too() -> None:
    other = artifacts.pack(replace(HEADER, variant="lora_expand/t8-l8-o32"), RAW)

    assert artifacts.digest_of(other) != artifacts.digest_of(DATA)
