"""`import aot_lora` loads nothing heavy, so that a server or a CLI pays only for what it uses."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAVY = {"jax", "jaxlib", "torch", "pydantic", "rich", "yaml", "numpy", "click"}


def loaded_by_import(folder: Path) -> set[str]:
    """The top-level modules that a fresh `import aot_lora` from `folder` loads."""
    code = "import sys; import aot_lora; print(aot_lora.__file__); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    origin, modules = done.stdout.splitlines()
    assert Path(origin).is_relative_to(folder), "measured some other copy of the package"
    return {name.partition(".")[0] for name in modules.split()}


def test_import_is_light() -> None:
    assert not loaded_by_import(ROOT) & HEAVY


def test_a_heavy_import_would_be_seen(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "aot_lora", tmp_path / "aot_lora")
    with (tmp_path / "aot_lora/__init__.py").open("a") as source:
        source.write("\nimport numpy\n")

    assert loaded_by_import(tmp_path) & HEAVY == {"numpy"}
