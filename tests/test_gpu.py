"""The cuda target end to end, where a GPU is present: warm up, load, run, refuse to compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = """
model: {q_proj: [256, 512], down_proj: [512, 256]}
target: {platform: cuda}
lora: {ranks: [8, 16, 64], slots: [0, 1, 2, 4], max_adapters: 8, dtype: bfloat16}
tokens: {budget: 256, buckets: [16, 256]}
store: {root: store}
"""

SERVE = """
import sys
import jax, numpy as np
import aot_lora
from aot_lora.adapters import pack_arrays
from aot_lora.kernels.reference import lora, tolerance

rng = np.random.default_rng(0)
def normal(*shape):
    return (rng.standard_normal(shape) / shape[-1] ** 0.5).astype(jax.numpy.bfloat16)

with aot_lora.Runtime.open(sys.argv[1]) as runtime:
    assert runtime.device.platform == "gpu", runtime.device
    adapters = {}
    for slot, rank in ((0, 8), (2, 16), (5, 64)):
        adapters[slot] = normal(rank, 256), normal(rank, 512)
        a, b = adapters[slot]
        runtime.banks.put(slot, pack_arrays({("q_proj", 0): (a, b.T)}, runtime.plan))
    for rows in ([0, 2, 5, -1] * 40, [5] * 16, [-1, 2], [-1]):
        slots = np.array(rows)
        x, base = normal(len(rows), 256), normal(len(rows), 512)
        y = runtime.apply("q_proj", x, slots, base).numpy()
        expected = lora(x, base, adapters, slots)
        error = np.linalg.norm(y.astype("f4") - expected) / np.linalg.norm(expected)
        assert error < tolerance("bfloat16", reduction=256), error
        assert (y[slots == -1] == base[slots == -1]).all()
    try:
        jax.jit(lambda x: x * 3)(jax.device_put(np.ones(7)))
    except aot_lora.errors.RecompileError as error:
        print("refused:", error.problem)
"""


@pytest.fixture
def gpu_config(tmp_path: Path) -> Path:
    code = "import jax, sys; sys.exit(jax.default_backend() != 'gpu')"
    if subprocess.run([sys.executable, "-c", code], env=_environment(), check=False).returncode:
        pytest.skip("no GPU on this host")
    path = tmp_path / "gpu.yaml"
    path.write_text(CONFIG, encoding="utf-8")
    return path


def _environment() -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return {**clean, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def _run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        env=_environment(),
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_warmup_then_serve_without_a_compile(gpu_config: Path):
    cold = _run("-m", "aot_lora", "warmup", str(gpu_config))
    assert " 0 failed" in cold, cold
    again = _run("-m", "aot_lora", "warmup", str(gpu_config))
    for nothing in (" 0 compiled", " 0 traced"):
        assert nothing in again, again
    served = _run("-c", SERVE, str(gpu_config))
    assert "refused: refused to compile" in served, served
    proven = _run("-m", "aot_lora", "verify", str(gpu_config), "--execute")
    assert "variants are right" in proven, proven


def test_the_gpus_own_target_config_serves_it_and_no_other_gpu(gpu_config: Path) -> None:
    """Doctor, autotune, warm up without the GPU, serve with it; then a GPU of one core more."""
    own = gpu_config.with_name("own.txtpb")
    text = gpu_config.read_text(encoding="utf-8")
    gpu_config.write_text(
        text.replace("platform: cuda", "platform: cuda, topology: own.txtpb"), encoding="utf-8"
    )
    _run("-m", "aot_lora", "doctor", "--target-config", "-o", str(own))
    recorded = _run("-m", "aot_lora", "autotune", str(gpu_config))
    assert " results for " in recorded, recorded

    cold = _run("-m", "aot_lora", "warmup", str(gpu_config))
    assert " 0 failed" in cold, cold
    assert "without a recorded autotuning" not in cold, cold
    served = _run("-c", SERVE, str(gpu_config))
    assert "refused: refused to compile" in served, served

    cores = re.search(r"core_count: (\d+)", own.read_text(encoding="utf-8"))
    assert cores is not None
    more = f"core_count: {int(cores[1]) + 1}"
    own.write_text(own.read_text(encoding="utf-8").replace(cores[0], more), encoding="utf-8")
    _run("-m", "aot_lora", "warmup", str(gpu_config))
    with pytest.raises(AssertionError, match="not the one of the target config"):
        _run("-c", SERVE, str(gpu_config))
