"""Layouts of arguments: recorded as text, rebuilt at the load, refused where they differ."""

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from serving import manifest_of, store_of, warm, write

from aot_lora import Program, _jax_compat
from aot_lora._jax_compat.layouts import layout_of, layout_text, layouts_of
from aot_lora.errors import OutOfPlanError
from aot_lora.lowering.trace import trace
from aot_lora.plan import Variant

W = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
X = np.ones((4, 64), np.float32)
ARGS = (jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((4, 64), "float32"))


def times(w: jax.Array, x: jax.Array) -> jax.Array:
    return x @ w


def test_a_recorded_layout_is_honoured_and_another_refused() -> None:
    device = jax.devices()[0]
    columns = Format(Layout((1, 0)), jax.sharding.SingleDeviceSharding(device))
    found = trace(Variant("step"), Program(fn=times, args=ARGS), platform="cpu")
    compiled = jax.jit(times, in_shardings=(columns, None)).trace(*ARGS).lower().compile()
    signature = replace(found.signature, layouts=layouts_of(compiled))
    assert signature.layouts == ("[[1, 0], [], 0]", "")

    loaded = _jax_compat.load(_jax_compat.serialize(compiled), signature, device)
    put = jax.device_put(W, loaded.input_formats[0][0])
    assert put.format.layout.major_to_minor == (1, 0)
    np.testing.assert_array_equal(loaded(put, jax.device_put(X)), X @ W)
    with pytest.raises(OutOfPlanError, match="`w` lies in another layout") as caught:
        loaded(jax.device_put(W), jax.device_put(X))
    assert caught.value.expected == "[[1, 0], [], 0]"
    assert caught.value.found == "[[0, 1], [], 0]"


def test_the_compilers_choice_is_asked_for_and_part_of_the_fingerprint() -> None:
    own = trace(Variant("s"), Program(fn=times, args=ARGS, auto_layouts=(0,)), platform="cpu")
    plain = trace(Variant("s"), Program(fn=times, args=ARGS), platform="cpu")
    assert own.fingerprint != plain.fingerprint
    assert layouts_of(own.lowered.compile()) == ()  # a CPU chooses the default


def test_text_reads_back() -> None:
    layout = Layout((0, 2, 1), ((8, 128), (2, 1)))
    assert layout_text(layout_of(layout_text(layout))) == layout_text(layout)
    assert layout_of("") is None


ENGINE = """\
from aot_lora import Program

def turned(point, context):
    return Program(fn=lambda w: w.T, args=(context.array(256, 512),), auto_layouts=(0,))
"""


@pytest.mark.tpu_compile
def test_a_tpu_chooses_a_layout_and_it_is_stored(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    write(tmp_path / "turning.py", ENGINE)
    config = write(
        tmp_path / "turning.yaml",
        "model: {q_proj: [16, 16]}\n"
        'target: {platform: tpu, topology: "v6e:1x1"}\n'
        "lora: {ranks: [8], slots: [0], max_adapters: 1}\n"
        "tokens: {budget: 8, buckets: [8]}\n"
        'programs: [{entry: "turning:turned"}]\n'
        "store: {root: store}\n",
    )
    assert warm(config)["failed"] == 0
    (entry,) = manifest_of(config).entries
    (layout,) = store_of(config).read_entry(entry).header.signature.layouts
    assert layout_of(layout).major_to_minor == (1, 0)  # then transposing moves nothing
    assert layout_of(layout).tiling
