"""Meshes and replicas, on four devices that XLA makes of one CPU."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from adapter_files import random_weights, write_adapter
from jax.sharding import PartitionSpec
from serving import cli, store_of, warm

from aot_lora import Program, Runtime, load_config
from aot_lora.errors import ProgramError, UnsupportedError
from aot_lora.lowering.check import trace_all
from aot_lora.lowering.trace import Trace, trace
from aot_lora.plan import TargetSpec, Variant
from aot_lora.programs.mesh import AXIS, abstract_mesh
from aot_lora.programs.spec import Context

CONFIG = """\
model: {q_proj: [16, 32], o_proj: [32, 16]}
layers: 2
target: {platform: cpu}
mesh: {tp: 4}
lora: {ranks: [8, 16], slots: [0, 1, 2], max_adapters: 3, dtype: float32}
tokens: {budget: 8, buckets: [8]}
store: {root: store}
"""
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")


@pytest.fixture(scope="module")
def meshed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed(tmp_path_factory.mktemp("meshed"), CONFIG)


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return warmed(tmp_path_factory.mktemp("one"), CONFIG.replace("tp: 4", "tp: 1"))


def warmed(folder: Path, text: str) -> Path:
    config = folder / "config.yaml"
    config.write_text(text)
    assert warm(config)["failed"] == 0
    return config


def apply(runtime: Runtime, module: str, slots: list[int], *, layer: int = 1) -> np.ndarray:
    rng = np.random.default_rng(5)
    shape = next(m for m in runtime.plan.modules if m.name == module)
    x, base = (rng.standard_normal((len(slots), width), np.float32) for width in (shape.d, shape.o))
    return runtime.apply(module, x, np.array(slots), base, layer=layer).numpy()


@pytest.mark.parametrize("rank", [1, 3, 8, 16])
def test_four_devices_give_what_one_gives(
    meshed: Path, one: Path, tmp_path: Path, rank: int
) -> None:
    """Case 16: for every rank, through `Runtime.adapters`, with and without a mask."""
    shapes = {"q_proj": (16, 32), "o_proj": (32, 16)}
    for seed, name in enumerate(("a", "b")):
        write_adapter(tmp_path / name, random_weights(shapes, rank=rank, layers=2, seed=seed))
    found: list[list[np.ndarray]] = []
    for config in (meshed, one):
        with Runtime.open(config) as runtime:
            a, b = (runtime.adapters.load(tmp_path / name) for name in ("a", "b"))
            mixes = ([a, -1, b], [a] * 5, [-1, -1])
            found.append([apply(runtime, m, mix) for m in shapes for mix in mixes])
    for ours, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_every_executable_of_a_mesh_is_right_on_four_devices(meshed: Path) -> None:
    done = cli("verify", meshed, "--execute", XLA_FLAGS="")
    assert done.returncode == 0, done.stderr
    total = len(load_config(meshed).plan.variants)
    assert f"{total} of {total} variants are right" in done.stdout


def test_only_the_shrink_of_divided_inputs_exchanges_anything(meshed: Path) -> None:
    with Runtime.open(meshed) as runtime:
        for variant, executable in runtime._executables.loaded.items():
            text = executable.as_text()
            count = len(re.findall(rf" ({'|'.join(COLLECTIVES)})(-start)?\(", text))
            divided = variant.program.startswith("lora_shrink") and "row" in dict(variant.dims)
            assert count == divided, variant.name


def test_banks_and_results_lie_where_the_mesh_says(meshed: Path) -> None:
    with Runtime.open(meshed) as runtime:
        a_bank, b_bank = runtime.banks.arrays["o_proj"]
        assert a_bank.sharding.spec == PartitionSpec(None, None, None, AXIS)
        assert b_bank.sharding.is_fully_replicated
        parts = [shard.data.nbytes for shard in a_bank.addressable_shards]
        assert parts == [a_bank.nbytes // 4] * 4
        held = sum(
            bank.addressable_shards[0].data.nbytes
            for pair in runtime.banks.arrays.values()
            for bank in pair
        )
        assert runtime.plan.bank_bytes == held


def test_a_store_serves_a_replica_on_each_device(one: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "a", random_weights({"q_proj": (16, 32)}, rank=8, layers=2))
    replicas = [Runtime.open(one, device=device) for device in jax.devices()]
    try:
        results = []
        for device, runtime in zip(jax.devices(), replicas, strict=True):
            slot = runtime.adapters.load(tmp_path / "a")
            x = np.ones((3, 16), np.float32)
            result = runtime.apply("q_proj", x, np.array([slot, -1, slot]), layer=0)
            assert result.array.devices() == {device}
            results.append(result.numpy())
        assert all(np.array_equal(results[0], other) for other in results)
        assert results[0][0].any()
    finally:
        for runtime in replicas:
            runtime.close()


def test_a_mesh_on_the_devices_behind_others(tmp_path: Path, meshed: Path) -> None:
    config = warmed(tmp_path, CONFIG.replace("tp: 4", "tp: 2"))
    with Runtime.open(config, device=jax.devices()[2]) as runtime:
        assert runtime.places.devices == tuple(jax.devices()[2:])
        shapes = {"o_proj": (32, 16)}
        write_adapter(tmp_path / "a", random_weights(shapes, rank=8, layers=2))
        assert runtime.adapters.load(tmp_path / "a") == 0
        assert apply(runtime, "o_proj", [0, -1]).shape == (2, 16)
    with pytest.raises(UnsupportedError, match="more devices than this host") as error:
        Runtime.open(config, device=jax.devices()[3])
    assert error.value.found == f"1 from {jax.devices()[3]} on"
    with pytest.raises(UnsupportedError, match="more devices"):
        Runtime.open(meshed, device=jax.devices()[1])


def test_a_host_with_too_few_devices_is_refused_before_anything_is_loaded(meshed: Path) -> None:
    script = "import aot_lora, sys; aot_lora.Runtime.open(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", script, str(meshed)],
        capture_output=True,
        text=True,
        env=os.environ | {"XLA_FLAGS": ""},
    )
    assert "the mesh has more devices than this host" in done.stderr
    assert "expected: 4 cpu devices" in done.stderr
    assert "set XLA_FLAGS=--xla_force_host_platform_device_count=4" in done.stderr


def test_an_artifact_of_one_device_is_none_of_four(meshed: Path, one: Path) -> None:
    entries = {e.variant: e.key for e in store_of(one).manifests().popitem()[1].entries}
    others = {e.variant: e.key for e in store_of(meshed).manifests().popitem()[1].entries}
    assert not set(entries.values()) & set(others.values())
    assert "lora_shrink/t8-l16-d32-n2-row4" in others
    assert "lora_shrink/t8-l16-d32-n2" in entries


def test_a_lock_needs_no_devices_and_reads_as_the_warmup_does(meshed: Path) -> None:
    loaded = load_config(meshed)
    lines, failed = trace_all(loaded)
    assert not failed
    store = store_of(meshed)
    (manifest,) = store.manifests().values()
    for entry in manifest.entries:
        header = store.read_entry(entry).header
        assert header.parts["fingerprint"] == lines["cpu tp=4"][entry.variant].fingerprint


# --- A user's programs ----------------------------------------------------------------------------


def context(plan_of: Path) -> Context:
    plan = load_config(plan_of).plan
    return Context(plan=plan, target=TargetSpec("cpu", devices=4), mesh=abstract_mesh(4))


def traced(program: Program) -> Trace:
    return trace(Variant("step", 8), program, platform="tpu", devices=4)


def test_an_argument_without_a_sharding_is_refused_on_a_mesh(meshed: Path) -> None:
    bare = {"w": jax.ShapeDtypeStruct((4, 4), "float32")}
    whole = context(meshed).array(4, 4)
    with pytest.raises(ProgramError, match="on a mesh an argument needs a sharding") as error:
        traced(Program(fn=lambda x, w: x @ w["w"], args=(whole, bare)))
    assert "argument [1]['w']" in str(error.value)


def test_static_values_and_names_are_part_of_a_program(meshed: Path) -> None:
    def step(x: jax.Array, *, twice: bool) -> jax.Array:
        return x + x if twice else x * 3

    def make(**more: Any) -> Program:
        return Program(fn=step, args=(context(meshed).array(4),), **more)

    first, second = (traced(make(static={"twice": value})) for value in (True, False))
    assert first.fingerprint != second.fingerprint
    named = traced(make(static={"twice": True}, names=("tokens",)))
    assert named.fingerprint == first.fingerprint
    assert [spec.name for spec in named.signature.inputs] == ["tokens"]
    with pytest.raises(ProgramError, match="not one name for each argument"):
        traced(make(static={"twice": True}, names=("a", "b")))


def test_a_division_moves_the_fingerprint(meshed: Path) -> None:
    c = context(meshed)
    specs = (PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS))
    programs = (Program(fn=abs, args=(c.array(4, 4, spec=spec),)) for spec in specs)
    found = {traced(program).fingerprint for program in programs}
    assert len(found) == 3
