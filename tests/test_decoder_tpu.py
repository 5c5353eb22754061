"""The decoder's steps by the real TPU compiler, on a host that has no TPU. Nothing runs on one."""

from pathlib import Path

import pytest
from decoding import DECODER
from serving import manifest_of, store_of, warm, write

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile


def test_both_steps_are_compiled_for_a_tpu(tmp_path: Path) -> None:
    text = (
        DECODER.replace("platform: cpu", 'platform: tpu, topology: "v6e:1x1"')
        .replace("dtype: float32", "dtype: bfloat16")
        .replace("ranks: [4, 16]", "ranks: [8]")
        .replace("  - lora\n", "")
    )
    config = write(tmp_path / "decoder.yaml", text)
    report = warm(config)

    # At four rows, as many as sequences, the two steps are one program at each of two points.
    assert (report["variants"], report["compiled"], report["failed"]) == (8, 6, 0)
    store = store_of(config)
    headers = [store.read_entry(entry).header for entry in manifest_of(config).entries]
    assert {header.parts["device kind"] for header in headers} == {"TPU v6 lite"}
