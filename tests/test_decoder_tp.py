"""The decoder over several chips, on as many devices as a host's CPU can be told to show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from decoding import DECODER
from serving import write

from aot_lora import errors, load_config
from aot_lora.decoder import specs

# Heads, widths and vocabulary that four chips can share.
SPLIT = (
    DECODER.replace("kv_heads: 2", "kv_heads: 4")
    .replace("vocab: 97", "vocab: 96")
    .replace("k_proj: [32, 16], v_proj: [32, 16]", "k_proj: [32, 32], v_proj: [32, 32]")
)

CHILD = """
import re
import sys
import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import aot_lora
from aot_lora.decoder import masked_lora, random_weights, specs, step
from aot_lora.decoder.programs import step_args
from aot_lora.plan import TargetSpec

plan = aot_lora.load_config(sys.argv[1]).plan
context = aot_lora.Context(plan=plan, target=TargetSpec(platform="cpu"))
sizes = step_args(aot_lora.Point(tokens=24, lanes=48), context)
rng = np.random.default_rng(3)


def drawn(size):
    return rng.standard_normal(size.shape, np.float32) / 5


banks = jax.tree.map(drawn, sizes[4])
for pair in banks.values():
    for bank in pair:
        bank[:, 0] = 0
rows = {  # two sequences decode, a third has a prompt of nine, and the rest is padding
    "tokens": rng.integers(0, 96, 24, np.int32),
    "positions": np.array([5, -1, 7, -1, *range(9), *[-1] * 11], np.int32),
    "sequences": np.array([0, 0, 2, 0, *[3] * 9, *[0] * 11], np.int32),
}
sampling = {
    "rows": np.array([0, -1, 2, 12], np.int32),
    "temperature": np.array([0, 0, 0.9, 0], np.float32),
    "seeds": np.array([0, 0, 5, 0], np.uint32),
}
blocks = sizes[5]["blocks"].shape[0]
batch = {
    "blocks": np.array([1, 2, 3, *[0] * (blocks - 3)], np.int32),
    "owners": np.array([0, 2, 2, *[-2] * (blocks - 3)], np.int32),
    "slots": np.array([0, -1, -1, -1, *[2] * 9, *[-1] * 11], np.int32),
}
args = (random_weights(plan, 1), jax.tree.map(drawn, sizes[1]), rows, sampling, banks, batch)


def program(axis, adapted):
    def run(weights, cache, rows, sampling, banks, batch):
        slots = batch["slots"]
        added = {
            "lora": masked_lora(banks, batch, slots),
            "head_lora": masked_lora(banks, batch, slots[sampling["rows"]]),
        }
        kwargs = added if adapted else {}
        return step(
            plan.decoder, weights, cache, rows, sampling, decode_rows=4, axis=axis, **kwargs
        )

    return run


def split(tp, adapted):
    s = specs(plan, tp=tp)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:tp]), ("tp",))
    ins = (s.weights, s.cache, P(), P(), s.banks, P())
    f = jax.jit(
        jax.shard_map(
            program("tp", adapted), mesh=mesh, in_specs=ins, out_specs=(P(), s.cache)
        )
    )
    compiled = f.lower(*args).compile()
    found = re.findall(
        r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?[(]",
        compiled.as_text(),
    )
    put = jax.device_put(args, compiled.input_shardings[0])
    return jax.device_get(compiled(*put)), found


alone = {adapted: jax.device_get(jax.jit(program(None, adapted))(*args)) for adapted in (0, 1)}
assert (alone[0][1]["k"] != alone[1][1]["k"]).any(), "control: the adapters do something"
for tp in (2, 4):
    counts = []
    for adapted in (0, 1):
        (tokens, cache), found = split(tp, adapted)
        assert (tokens == alone[adapted][0]).all(), (tokens, alone[adapted][0])
        for name in cache:
            np.testing.assert_allclose(cache[name], alone[adapted][1][name], atol=2e-5)
        counts.append(found)
    assert counts[0] == counts[1], counts
    # The embedding, two in a layer, and two to agree on the best token.
    assert counts[0] == ["all-reduce"] * 5, counts
print("equal", *alone[1][0])
"""


def test_two_and_four_chips_do_as_one_and_adapters_add_no_collective(tmp_path: Path) -> None:
    config = write(tmp_path / "split.yaml", SPLIT)
    environ = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, config],
        capture_output=True,
        text=True,
        timeout=120,
        env=environ,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("equal ")


@pytest.mark.parametrize(
    ("tp", "text"),
    [(3, "4 heads cannot be split over 3 chips"), (4, "2 kv_heads cannot be split over 4 chips")],
)
def test_chips_that_do_not_divide_the_heads_are_refused(tmp_path: Path, tp: int, text: str) -> None:
    plan = load_config(write(tmp_path / "decoder.yaml", DECODER)).plan

    with pytest.raises(errors.ProgramError) as caught:
        specs(plan, tp=tp)
    assert text in str(caught.value)
    assert f"found: tp={tp}" in str(caught.value)
