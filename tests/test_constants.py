"""Arrays that a program closes over: named with their sizes, before anything compiles."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from serving import cli, write

from aot_lora import Program, errors, load_config
from aot_lora._jax_compat.constants import Constant, constants_of, listed
from aot_lora.lowering.trace import trace
from aot_lora.plan import Variant

X = jax.ShapeDtypeStruct((4, 512), "float32")
TABLE = np.random.default_rng(0).random((512, 1024), np.float32)
HELD = jax.device_put(np.arange(512, dtype=np.int32))

ENGINE = """\
import numpy as np
from aot_lora import Program

TABLE = np.random.default_rng(0).random((512, 1024), np.float32)
SMALL = np.arange(512, dtype=np.float32)

def large(point, context):
    return Program(fn=lambda x: x @ TABLE, args=(context.array(point.tokens, 512),))

def small(point, context):
    return Program(fn=lambda x: x + SMALL, args=(context.array(point.tokens, 512),))
"""


def inner(y: jax.Array) -> jax.Array:
    return (y @ TABLE)[:, :512] + HELD


def step(x: jax.Array) -> jax.Array:
    x = x @ TABLE @ TABLE.T + np.float32(2)
    return jax.lax.map(inner, jax.jit(inner)(x)[None]) + 1.0


def test_each_is_found_once_wherever_it_is_used() -> None:
    found = constants_of(jax.jit(step).trace(X))
    assert [(one.shape, one.dtype, one.bytes, one.of_jax) for one in found] == [
        ((512, 1024), "float32", 2**21, False),
        ((1024, 512), "float32", 2**21, False),  # a view, and another constant
        ((512,), "int32", 2**11, True),
    ]


def test_a_list_of_them_is_short_and_has_the_total() -> None:
    one = Constant(shape=(2, 3), dtype="float32", bytes=24, of_jax=False)
    assert listed([one]) == "float32[2,3] of 24 bytes; 24 bytes in all"
    many = listed([one] * 7)
    assert many.endswith("float32[2,3] of 24 bytes, 2 more; 168 bytes in all")


def test_above_a_mebibyte_there_is_a_warning() -> None:
    large = trace(Variant("large"), Program(fn=lambda x: x @ TABLE, args=(X,)), platform="cpu")
    small = trace(Variant("small"), Program(fn=lambda x: x + HELD, args=(X,)), platform="cpu")

    assert large.warning.startswith(
        "large/l0 holds constants: float32[512,1024] of 2,097,152 bytes; 2,097,152 bytes in all"
    )
    assert small.warning == ""
    assert [one.bytes for one in small.constants] == [2048]


REFUSED = """
import jax
import numpy as np
from aot_lora import Program
from aot_lora.lowering.trace import trace
from aot_lora.plan import Variant

held = jax.device_put(np.ones((512, 1024), np.float32))
table = np.ones((512, 512), np.int32)
program = Program(
    fn=lambda x: (x + held, jax.jit(lambda y: y * table)(x[0, 0])),
    args=(jax.ShapeDtypeStruct((512, 1024), "float32"),),
)
trace(Variant("step"), program, platform="cpu")
"""


def test_what_jax_would_hand_over_at_each_call_is_refused_before_the_compile() -> None:
    environ = os.environ | {"JAX_USE_SIMPLIFIED_JAXPR_CONSTANTS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], env=environ, capture_output=True, text=True
    )
    assert (
        "step/l0: the program closes over arrays\n"
        "  found: float32[512,1024] of 2,097,152 bytes, int32[512,512] of 1,048,576 bytes; "
        "3,145,728 bytes in all\n"
        "  next: pass them as arguments"
    ) in done.stderr


@pytest.mark.parametrize("verb", ["warmup", "check"])
def test_the_command_line_warns_with_variant_and_bytes(tmp_path: Path, verb: str) -> None:
    write(tmp_path / "holding.py", ENGINE)
    config = write(
        tmp_path / "holding.yaml",
        "model: {q_proj: [16, 16]}\n"
        "target: {platform: cpu}\n"
        "lora: {ranks: [8], slots: [0], max_adapters: 1, dtype: float32}\n"
        "tokens: {budget: 8, buckets: [8]}\n"
        'programs: [{entry: "holding:large"}, {entry: "holding:small"}]\n'
        "store: {root: store}\n",
    )
    assert load_config(config).plan.variants
    if verb == "check":
        assert cli("check", config, "--update").returncode == errors.EXIT_OK
    done = cli(verb, config)

    assert done.returncode == errors.EXIT_OK, done.stderr
    assert "warning: large/t8-l0 holds constants: float32[512,1024] of 2,097,152" in done.stderr
    assert "small/" not in done.stderr
