"""Device memory with the real TPU compiler, on a host that has no TPU."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from decoding import DECODER
from serving import cli

from aot_lora import errors
from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import worker_environment
from aot_lora.targets.hbm import TPU_HBM_GIB

pytest.importorskip("libtpu")
pytestmark = pytest.mark.tpu_compile

GIB = 2**30
OVERFLOW = """
import sys
import jax
from jax.sharding import SingleDeviceSharding
from aot_lora.plan import TargetSpec
from aot_lora.targets.devices import compile_devices

device = compile_devices(TargetSpec("tpu", sys.argv[1]))[0]
large = jax.ShapeDtypeStruct((300, 2**28), "float32", sharding=SingleDeviceSharding(device))
jax.jit(lambda x: x + 1, donate_argnums=0).lower(large).compile()
"""


@pytest.mark.parametrize("topology", ["v4:1x1x1", "v5e:1x1", "v5p:1x1x1", "v6e:1x1", "tpu7x:1x1x1"])
def test_the_table_has_what_the_compiler_says(topology: str) -> None:
    environ = os.environ | worker_environment(TargetSpec("tpu", topology))
    done = subprocess.run(
        [sys.executable, "-c", OVERFLOW, topology], env=environ, capture_output=True, text=True
    )
    found = re.search(r"exceeds available HBM \(([\d.]+)G\)", done.stderr)
    assert found, done.stderr
    assert 0 <= float(found[1]) - TPU_HBM_GIB[topology.partition(":")[0]] < 0.02


def tiny(folder: Path, *, length: int) -> Path:
    """A small decoder for one v6e chip, whose cache takes 8 MiB for each token of length."""
    path = folder / "decoder.yaml"
    text = DECODER.replace("{platform: cpu}", '{platform: tpu, topology: "v6e:1x1"}')
    for written, wanted in {
        "  - lora\n": "",
        '  - {entry: "aot_lora.decoder:decode_step"}\n': "",
        "float32": "bfloat16",
        "slots: [0, 3]": "slots: [3]",
        "[32, 32]": "[32, 1024]",
        "[32, 16]": "[32, 1024]",
        "o_proj: [32, 1024]": "o_proj: [1024, 32]",
        "head_dim: 8": "head_dim: 128",
        "heads: 4": "heads: 8",
        "kv_heads: 2": "kv_heads: 8",
        "{sequences: 4, length: 48}": f"{{sequences: 1024, length: {length}}}",
    }.items():
        text = text.replace(written, wanted)
    path.write_text(text)
    return path


@pytest.mark.once
def test_the_longest_cache_compiles(tmp_path: Path) -> None:
    done = cli("plan", tiny(tmp_path, length=256), "--memory", "--format", "json")
    assert done.returncode == errors.EXIT_OK, done.stderr
    found = json.loads(done.stdout)["memory"]["tpu v6e:1x1"]

    assert found["fits"]
    assert found["device"] == int(TPU_HBM_GIB["v6e"] * GIB)
    assert found["code"] > 0
    length = found["largest_kv_length"]
    assert length % 128 == 0
    assert length > 2048
    assert found["total_at_largest"] <= found["device"]


@pytest.mark.once
def test_a_cache_that_does_not_fit_is_refused_with_one_that_does(tmp_path: Path) -> None:
    done = cli("plan", tiny(tmp_path, length=2**13), "--memory")
    assert done.returncode == errors.EXIT_USAGE, done.stderr
    assert "largest kv_cache.length that fits" in done.stdout
    assert "the plan needs more memory than a device may give it" in done.stderr
    length = re.search(r"next: `kv_cache: \{sequences: \d+, length: (\d+)\}` fits", done.stderr)
    assert length, done.stderr
    assert int(length[1]) % 128 == 0
