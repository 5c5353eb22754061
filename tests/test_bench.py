"""`aot-lora bench`: what it prints, what it writes, and what it refuses."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import pytest

from aot_lora import errors
from aot_lora.cli.main import run
from aot_lora.config.tables import Row, Table, read_table
from aot_lora.tuning.measure import Point, Timed, Tuned

FEW = ("--tokens", "4", "--lanes", "8", "--form", "laned", "--form", "one_launch")
TPU = {"target": '{platform: tpu, topology: "v6e:1x1"}'}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the verb sets for its process does not outlive a test."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every form takes 2 us."""

    def measure(point: Point, forms: Mapping[str, Tuned], *, platform: str) -> Timed:
        return Timed(base=1.0, link=0.0, forms=dict.fromkeys(forms, 2.0), refused={})

    monkeypatch.setattr("aot_lora.tuning.table.measure", measure)


@pytest.fixture
def config(write_config: Callable[..., Path]) -> Path:
    """A config of one point: its two modules have the same sizes."""
    return write_config(model="{q_proj: [16, 16], o_proj: [16, 16]}")


@pytest.fixture
def v6e(write_config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """As `config`, for a TPU that is a CPU, with a folder of tables of its own."""
    monkeypatch.setattr("aot_lora.targets.devices.host_devices", lambda _: jax.devices())
    path = write_config(model="{q_proj: [16, 16]}", **TPU)
    monkeypatch.setattr("aot_lora.config.presets.presets_root", lambda: path.parent)
    (path.parent / "devices").mkdir()
    return path


@pytest.mark.once
def test_the_table_is_on_stdout_and_the_points_on_stderr(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(config), *FEW]) == errors.EXIT_OK
    found = capsys.readouterr()

    table = Table.model_validate_json(found.out, strict=False)
    (row,) = table.rows
    assert (row.tokens, row.lanes, row.d, row.o) == (4, 8, 16, 16)
    assert row.us.keys() == {"laned"}
    assert f"aot-lora bench {config} --tune, on cpu with jax" in table.source
    (line,) = found.err.splitlines()
    assert line.startswith("t4 l8 d16 o16: base ")
    assert line.endswith("; not one_launch: it runs on a GPU")


@pytest.mark.usefixtures("measured")
def test_json_is_one_object(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(config), *FEW, "--format", "json"]) == errors.EXIT_OK

    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"rows": 1, "path": None}


@pytest.mark.usefixtures("measured")
def test_tuning_adds_to_the_table_of_the_hardware(
    v6e: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = v6e.parent / "devices" / "v6e.kernels.json"
    old = Row(tokens=64, lanes=8, d=16, o=16, us={"laned": 1.5})
    path.write_text(Table(hardware="v6e", source="before", rows=(old,)).text())

    for tokens in ("4", "2"):
        asked = ("--tokens", tokens, "--lanes", "8", "--form", "laned", "--format", "json")
        assert run(["bench", str(v6e), "--tune", *asked]) == errors.EXIT_OK

    found = read_table(path)
    assert [row.tokens for row in found.rows] == [2, 4, 64]
    assert found.rows[-1] == old
    assert (found.hardware, found.source == "before") == ("v6e", False)
    captured = capsys.readouterr()
    assert json.loads(captured.out.splitlines()[-1]) == {"rows": 1, "path": str(path)}


@pytest.mark.usefixtures("measured")
def test_a_table_goes_where_it_is_asked_to(v6e: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = v6e.parent / "other.json"
    assert run(["bench", str(v6e), "--tune", "-o", str(path), *FEW]) == errors.EXIT_OK

    assert len(read_table(path).rows) == 1
    assert list((v6e.parent / "devices").iterdir()) == []
    assert capsys.readouterr().out == f"1 rows in {path}\n"


@pytest.mark.usefixtures("measured")
def test_a_folder_that_is_not_there_is_named(v6e: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = v6e.parent / "nowhere" / "table.json"

    assert run(["bench", str(v6e), "--tune", "-o", str(path), *FEW]) == errors.StoreError.exit_code
    assert f"{path}: the table cannot be written: No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--tune",), "a table is of some hardware, and this target names none"),
        (("-o", "table.json"), "-o goes with --tune"),
        (("--form", "fast"), "no form `fast`; there are laned, one_hot, "),
        (("--tokens", "0"), "--tokens': 0 is not in the range"),
        (("--lanes", "-8"), "--lanes': -8 is not in the range"),
    ],
)
def test_what_makes_no_sense_is_refused(
    options: tuple[str, ...], said: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(config), *options]) == errors.EXIT_USAGE
    found = capsys.readouterr()

    assert said in found.err
    assert found.out == ""
