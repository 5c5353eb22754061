"""`aot-lora doctor`: what it finds on this host, and what it writes of a GPU."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from gpus import H200

from aot_lora import errors
from aot_lora._jax_compat import topology
from aot_lora.cli import doctor
from aot_lora.cli.main import run
from aot_lora.plan import TargetSpec
from aot_lora.targets import devices, probe


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No child processes: every target but the CPU has something in its way."""
    monkeypatch.setattr(probe, "obstacle", lambda t: "" if t.platform == "cpu" else "no compiler")
    monkeypatch.setenv("AOT_LORA_CACHE", "/the/store")


@pytest.mark.usefixtures("quick")
def test_json_is_one_object_on_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--format", "json"]) == errors.EXIT_OK

    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert list(found) == ["versions", "devices", "targets", "store"]
    assert {"python", "aot-lora", "jax", "jaxlib"} <= set(found["versions"])
    assert found["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 4}]
    assert found["targets"] == [
        {"target": "cpu", "obstacle": "", "runs": True},
        {"target": "cuda h200", "obstacle": "no compiler", "runs": False},
        {"target": "tpu v6e:1x1", "obstacle": "no compiler", "runs": False},
    ]
    assert found["store"] == "/the/store"


@pytest.mark.usefixtures("quick")
def test_a_device_that_is_there_runs_its_target(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = doctor._Devices(platform="cuda", kind="NVIDIA H200", count=8)
    monkeypatch.setattr(doctor, "_devices", lambda: [gpu])

    assert run(["doctor"]) == errors.EXIT_OK
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cuda", "h200", "yes", "no", "compiler"] in rows
    assert ["cuda", "NVIDIA", "H200", "8"] in rows


def test_a_child_process_says_what_is_in_the_way() -> None:
    assert probe.obstacle(TargetSpec("cpu")) == ""
    assert probe.obstacle(TargetSpec("tpu", "v9:1x1")) != ""


def test_without_a_gpu_there_is_no_target_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.txtpb"

    code = run(["doctor", "--target-config", "-o", str(output)])

    assert code == errors.EXIT_UNSUPPORTED
    assert "no cuda device on this host" in capsys.readouterr().err
    assert not output.exists()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that says of itself what an H200 does."""
    found = (SimpleNamespace(device_kind="NVIDIA H200"),)
    monkeypatch.setattr(devices, "host_devices", lambda _: found)
    monkeypatch.setattr(topology, "target_config_of", lambda _: H200)


@pytest.mark.usefixtures("gpu")
def test_the_target_config_goes_to_stdout_or_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "gpu.txtpb"
    assert run(["doctor", "--target-config"]) == errors.EXIT_OK
    assert capsys.readouterr().out == H200

    assert run(["doctor", "--target-config", "-o", str(output), "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert output.read_text() == H200
    assert found == {"device": "NVIDIA H200", "path": str(output)}

    assert run(["doctor", "--target-config", "--format", "json"]) == errors.EXIT_OK
    assert json.loads(capsys.readouterr().out)["target_config"] == H200


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_written_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(["doctor", "--target-config", "-o", str(tmp_path / "no/gpu.txtpb")])

    assert code == errors.EXIT_UNSUPPORTED
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
    assert run(["doctor", "-o", "x"]) == errors.EXIT_USAGE
