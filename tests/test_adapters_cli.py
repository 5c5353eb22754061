"""`aot-lora adapters inspect`: what it prints, for people and for scripts, and its exit codes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from adapter_checks import RNG
from adapter_files import WEIGHTS, path_of, random_pair, random_weights, write_adapter
from syrupy.assertion import SnapshotAssertion

from aot_lora import errors
from aot_lora.cli.main import run

SHAPES = {"q_proj": (64, 64), "k_proj": (64, 32), "v_proj": (64, 32), "down_proj": (128, 64)}
CONFIG = """\
model: tiny
target: {platform: cpu}
lora: {ranks: [8, 16, 32], slots: [0, 1], max_adapters: 4, resident_lanes: 96}
tokens: {budget: 8, buckets: [8]}
"""


@pytest.fixture
def adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One of mixed ranks and scales with an idle target; its folder is the working folder."""
    monkeypatch.chdir(tmp_path)
    weights = random_weights(SHAPES, layers=2, rank=12)
    weights[path_of("q_proj", 1)] = random_pair(RNG, rank=24, d=64, o=64)
    return write_adapter(
        Path("sql-r12"),
        weights,
        dtype="bfloat16",
        lora_alpha=24,
        rank_pattern={r"layers\.1\..*q_proj": 24},
        target_modules=[*SHAPES, "o_proj"],
    )


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = run(["adapters", "inspect", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_what_it_holds(
    adapter: Path, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    code, out, err = said(capsys, adapter)

    assert (code, err) == (errors.EXIT_OK, "")
    assert out == snapshot


def test_how_a_config_serves_it(
    adapter: Path,
    write_config: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
    snapshot: SnapshotAssertion,
) -> None:
    config = write_config(CONFIG).name
    code, out, err = said(capsys, adapter, "--config", config)

    assert (code, err) == (errors.EXIT_OK, "")
    assert out == snapshot


def test_how_fused_modules_are_shown(
    tmp_path: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(CONFIG)
    weights = random_weights({"qkv_proj": (64, 128)}, layers=2, rank=8)
    _, out, _ = said(capsys, write_adapter(tmp_path / "a", weights), "--config", config)

    assert "split from qkv_proj" in out
    assert "served, but not in this adapter: o_proj, gate_proj, up_proj, down_proj" in out


def test_json_is_one_object_on_one_line(
    adapter: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config(CONFIG)
    code, out, _ = said(capsys, adapter, "--format", "json", "--config", config)
    found = json.loads(out)

    assert code == errors.EXIT_OK
    assert out.count("\n") == 1
    assert list(found) == [
        "adapter",
        "base_model",
        "dtypes",
        "file_bytes",
        "rank",
        "layers",
        "modules",
        "without_tensors",
        "base_copies",
        "config",
    ]
    assert found["file_bytes"] == (adapter / WEIGHTS).stat().st_size
    assert found["without_tensors"] == ["o_proj"]
    q = next(module for module in found["modules"] if module["module"] == "q_proj")
    assert (q["ranks"], q["scales"], q["layers"]) == ([12, 24], [1.0, 2.0], [0, 1])
    fit = found["config"]
    # Quantum 8: rank 24 owns 3 blocks of each bank. 1024 is D + O of all seven modules.
    assert (fit["rank"], fit["lanes"], fit["blocks"]) == (24, 24, 3)
    assert fit["bank_bytes"] == 2 * 24 * 1024 * 2
    assert fit["modules"][0] == {
        "module": "q_proj",
        "how": "direct",
        "from": ["q_proj"],
        "layers": [0, 1],
        "ranks": [12, 24],
    }


def test_without_a_config_json_says_so(adapter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(said(capsys, adapter, "--format", "json")[1])["config"] is None


def test_a_refusal_has_the_exit_code_of_its_kind(
    adapter: Path, write_config: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_config()  # q_proj and down_proj only
    code, out, err = said(capsys, adapter, "--config", config, "--format", "json")
    assert (code, out) == (errors.EXIT_USAGE, "")
    assert "modules apply; without k_proj, v_proj it would be another adapter" in err
    assert "Traceback" not in err

    (adapter / WEIGHTS).write_bytes(b"")
    code, out, err = said(capsys, adapter)
    assert (code, out) == (errors.EXIT_INTEGRITY, "")
    assert "too short" in err

    code, _, err = said(capsys, "absent", "--debug")
    assert code == errors.EXIT_USAGE
    assert "Traceback" in err
    assert "no such folder" in err


def test_the_name_of_a_base_cannot_write_to_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = random_weights({"q_proj": (64, 64)}, layers=1, rank=8)
    folder = write_adapter(
        tmp_path / "a", weights, base_model_name_or_path="\x1b]0;x\x07[bold]", target_modules=None
    )
    code, out, _ = said(capsys, folder)

    assert code == errors.EXIT_OK
    assert r"LoRA for \x1b]0;x\x07[bold]" in out
