"""An array that was given away, or is given twice, is an error; never a crash."""

import subprocess
import sys
from pathlib import Path

import pytest
from serving import warm, write

CONFIG = """\
model: {q_proj: [16, 8]}
target: {platform: cpu}
lora: {ranks: [8], slots: [0, 1], max_adapters: 2, dtype: float32}
tokens: {budget: 8, buckets: [8]}
programs: [lora, {entry: "donating:step"}]
store: {root: store}
"""
ENGINE = """\
from aot_lora import Program


def step(point, context):
    args = (context.array(8, 8), context.array(8, 8))
    return Program(fn=lambda cache, x: cache + x, args=args, donate=(0,))
"""
# A process of its own: JAX 0.10 could end it.
CHILD = """\
import sys
import jax
import numpy as np
import aot_lora
from aot_lora.adapters import pack_arrays

with aot_lora.Runtime.open(sys.argv[1]) as runtime:
    a, b = np.ones((8, 16), np.float32), np.ones((8, 8), np.float32)
    runtime.banks.put(0, pack_arrays({("q_proj", 0): (a, b)}, runtime.plan))
    batch = runtime.batch(np.zeros(8, int))
    step = runtime.lookup("step", tokens=8).executable
    put = lambda width: jax.device_put(np.ones((8, width), np.float32))
    x, base, cache = put(16), put(8), put(8)

    def again_in_apply():
        runtime.apply("q_proj", x, batch, base)
        runtime.apply("q_proj", x, batch, base)

    def again_in_a_step():
        step(cache, put(8))
        step(cache, put(8))

    def twice_in_a_step():
        step(cache, cache)

    def read_after():
        step(cache, put(8))
        np.asarray(cache)

    try:
        locals()[sys.argv[2]]()
    except Exception as error:
        print(type(error).__name__, error)
    result = step(put(8), put(8))  # and everything else goes on
    print("went on:", float(np.asarray(result)[0, 0]))
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("donation")
    write(folder / "donating.py", ENGINE)
    path = write(folder / "donation.yaml", CONFIG)
    assert warm(path)["failed"] == 0
    return path


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("again_in_apply", "OutOfPlanError `base` was given away: an earlier call took its buffer"),
        ("again_in_a_step", "deleted"),
        ("twice_in_a_step", "previously donated in the same call"),
        ("read_after", "deleted"),
    ],
)
def test_it_is_an_error_and_the_rest_goes_on(config: Path, case: str, error: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(config), case],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert error in done.stdout
    assert done.stdout.splitlines()[-1] == "went on: 2.0"
