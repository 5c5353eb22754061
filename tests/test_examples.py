"""The examples under docs/ run as their docstrings say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "docs" / "examples"


@pytest.mark.parametrize(
    ("config", "script", "says"),
    [
        pytest.param(
            *("cpu/quickstart", "serve_quickstart.py", "refused to compile"), marks=pytest.mark.once
        ),
        (str(EXAMPLES / "two_layer_step.yaml"), "serve_two_layer_step.py", "bucket of 64"),
        (str(EXAMPLES / "nnx_step.yaml"), "serve_nnx_step.py", "bucket of 64"),
    ],
)
def test_example(tmp_path: Path, config: str, script: str, says: str):
    environment = {**os.environ, "AOT_LORA_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    for command in (["-m", "aot_lora", "warmup", config], [str(EXAMPLES / script)]):
        done = subprocess.run(
            [sys.executable, *command],
            env=environment,
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        assert done.returncode == 0, done.stdout
    assert says in done.stdout, done.stdout
    errors = [line.split()[-1] for line in done.stdout.splitlines() if "largest error" in line]
    assert len(errors) == 3, done.stdout
    assert all(float(error) < 1e-5 for error in errors), done.stdout


def test_the_self_warming_engine_records_and_is_sealed(tmp_path: Path):
    script = [sys.executable, str(EXAMPLES / "self_warming_engine.py")]
    environment = {**os.environ, "AOT_LORA_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    said: list[str] = []
    for session in ("", "record:engine", "sealed:engine"):
        done = subprocess.run(
            script,
            env=environment | {"AOT_LORA_JIT": session},
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout.splitlines()[-1])
    assert len(set(said)) == 1
    assert said[0].startswith("37 rows: ")
