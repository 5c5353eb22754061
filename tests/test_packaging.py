"""The wheel holds the package, the presets and their locks, and nothing else."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names in the wheel built from the sdist, so that the sdist is proven whole as well."""
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_wheel_holds_the_package_and_the_presets_and_nothing_else(wheel_names: set[str]) -> None:
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "aot_lora").rglob("*.py")}
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "aot_lora/report/templates").iterdir()}
    presets = {
        f"aot_lora/_presets/{path.relative_to(ROOT / 'buckets')}"
        for suffix in ("*.yaml", "*.json", "*.txtpb", "*.textproto")
        for path in (ROOT / "buckets").rglob(suffix)
    }
    held = {name for name in wheel_names if ".dist-info/" not in name}

    assert held == code | pages | presets | {"aot_lora/py.typed"}
    assert "aot_lora/report/templates/page.html" in held


def test_wheel_carries_the_license_and_the_command(wheel_names: set[str]) -> None:
    info = {name.partition("/")[2] for name in wheel_names if ".dist-info/" in name}

    assert info == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


def test_every_preset_that_is_a_config_has_a_lock() -> None:
    configs = [p for p in (ROOT / "buckets").glob("*/*.yaml") if p.parent.name != "models"]

    assert configs
    assert [p.name for p in configs if not p.with_suffix(".lock.json").is_file()] == []
