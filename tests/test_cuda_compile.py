"""Warmup with XLA's compiler for GPUs, on a host that has no GPU. Nothing here runs on one."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpus import H200, needs_cuda_compiler, other, write_small
from serving import cli, manifest_of, store_of, warm

from aot_lora import load_config
from aot_lora.cli.main import run
from aot_lora.errors import EXIT_UNSUPPORTED, UnsupportedError
from aot_lora.lowering.check import trace_all
from aot_lora.runtime import load
from aot_lora.targets import cuda, devices

pytestmark = needs_cuda_compiler

PALLAS = """
import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from aot_lora import Program


def step(point, context):
    x = context.array(point.tokens, 64)
    return Program(fn=double, args=(x,))


def double(x):
    def kernel(x_ref, y_ref):
        y_ref[...] = x_ref[...] * 2
    params = triton.CompilerParams()
    return pl.pallas_call(kernel, out_shape=x, compiler_params=params)(x)
"""


def test_the_whole_plan_is_compiled_and_says_for_what(tmp_path: Path) -> None:
    config = write_small(tmp_path)

    report = warm(config)

    assert report["compiled"] == report["variants"] > 0
    manifest, store = manifest_of(config), store_of(config)
    headers = {entry.variant: store.read_entry(entry).header for entry in manifest.entries}
    assert manifest.parts["device kind"] == "NVIDIA H200"
    assert {len(header.parts["target config"]) for header in headers.values()} == {64}
    lines, failed = trace_all(load_config(config))  # As the lock is made: without a compiler.
    assert not failed
    assert {name: header.parts["fingerprint"] for name, header in headers.items()} == {
        name: line.fingerprint for name, line in lines["cuda h200"].items()
    }


def test_bytes_reach_xla_only_on_the_gpu_of_the_target_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = write_small(tmp_path)
    warm(config)
    loaded = load_config(config)
    handed = list[bytes]()

    def deserialize(raw: bytes, *_: object) -> None:
        handed.append(raw)
        raise RuntimeError("XLA has it")

    client = SimpleNamespace(deserialize_executable=deserialize)
    device = SimpleNamespace(device_kind="NVIDIA H200", client=client)
    monkeypatch.setattr("aot_lora._jax_compat.xla_client.DeviceList", lambda devices: devices)
    monkeypatch.setattr("aot_lora._jax_compat._options", lambda _: None)
    monkeypatch.setattr("aot_lora._jax_compat.SingleDeviceSharding", lambda _: None)
    monkeypatch.setattr(cuda, "target_config_of", lambda _: other("_count: 132", "_count: 131"))
    with pytest.raises(UnsupportedError, match=r"132 cores(.|\n)*131 cores"):
        load.load_all(loaded, loaded.targets[0], [device])
    assert handed == []

    monkeypatch.setattr(cuda, "target_config_of", lambda _: H200)
    with pytest.raises(RuntimeError, match="XLA has it"):
        load.load_all(loaded, loaded.targets[0], [device])
    assert handed


def test_verify_runnable_wants_the_gpu_of_the_target_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = str(write_small(tmp_path))
    warm(Path(config))
    assert run(["verify", config]) == 0  # the host of the build need not have it
    assert run(["verify", config, "--runnable"]) == EXIT_UNSUPPORTED

    monkeypatch.setattr(devices, "host_devices", lambda _: ["a GPU"])
    for text, code in ((H200, 0), (other("_count: 132", "_count: 131"), EXIT_UNSUPPORTED)):
        monkeypatch.setattr(cuda, "target_config_of", lambda _, text=text: text)
        assert run(["verify", config, "--runnable"]) == code


def test_a_pallas_kernel_is_traced_for_the_gpu_of_the_target_config(tmp_path: Path) -> None:
    config = write_small(tmp_path)
    (tmp_path / "engine.py").write_text(PALLAS)
    config.write_text(f'{config.read_text()}programs: [{{entry: "engine:step"}}]\n')

    report = warm(config)

    assert (report["failed"], report["compiled"] > 0) == (0, True)
    assert cli("check", config, "--update").returncode == 0


def test_a_mesh_of_two_gpus_is_compiled(tmp_path: Path) -> None:
    config = write_small(tmp_path)
    config.write_text(f"{config.read_text()}mesh: {{tp: 2}}\n")

    assert warm(config)["failed"] == 0
    parts = manifest_of(config).parts
    assert (parts["device count"], parts["device kind"]) == ("2", "NVIDIA H200")


def test_results_that_lack_a_matmul_are_warned_of_and_move_the_identity(tmp_path: Path) -> None:
    config = write_small(tmp_path)
    warm(config)
    before = manifest_of(config)
    (tmp_path / "small.autotune.textproto").write_text("version: 3\n")

    done = cli("warmup", config, "--format", "json")

    assert done.returncode == 0
    (warning,) = (line for line in done.stderr.splitlines() if line.startswith("warning"))
    assert "variants have matmuls without a recorded autotuning result" in warning
    assert json.loads(done.stdout)["compiled"] > 0
    assert before.parts["autotune results"] == ""
    assert len(manifest_of(config).parts["autotune results"]) == 64


@pytest.mark.parametrize("text", ["garbage {", "version: 2\n"])
def test_results_that_xla_cannot_read_are_refused(tmp_path: Path, text: str) -> None:
    config = write_small(tmp_path)
    (tmp_path / "small.autotune.textproto").write_text(text)

    done = cli("warmup", config)

    assert done.returncode == EXIT_UNSUPPORTED
    assert "the recorded autotuning results cannot be read" in done.stderr


def test_the_plans_memory_is_known_without_the_gpu(tmp_path: Path) -> None:
    done = cli("plan", write_small(tmp_path), "--memory", "--format", "json")

    assert done.returncode == 0
    memory = json.loads(done.stdout)["memory"]["cuda h200"]
    assert memory["device"] == 150109880320 * 3 // 4
    assert 0 < memory["banks"] < memory["total"]
    assert memory["fits"]
