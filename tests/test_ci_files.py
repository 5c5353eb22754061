"""The GitHub Action and the pre-commit hook: they run the command line, for this project too."""

import os
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from aot_lora.cli.check import command
from aot_lora.config.presets import preset_names

ROOT = Path(__file__).parents[1]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def arguments_of(folder: Path, **inputs: str) -> list[str]:
    """What the action's check step gives to `python -m aot_lora`."""
    step = read("action.yml")["runs"]["steps"][-1]
    assert set(inputs) <= set(step["env"])
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", "-e", "-c", step["run"]],
        env={"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **dict.fromkeys(step["env"], "")}
        | inputs,
        capture_output=True,
        text=True,
        check=True,
    )
    module, *arguments = done.stdout.splitlines()
    assert [module, *arguments[:2]] == ["-m", "aot_lora", "check"]
    return arguments[2:]


@pytest.mark.parametrize(
    "inputs",
    [
        {"CONFIGS": "a.yaml b.yaml"},
        {"CONFIGS": "a.yaml", "BASE": "main", "JUNIT": "a b.xml", "OPTIONS": "--twice"},
    ],
)
def test_the_action_runs_the_command_as_it_is(inputs: dict[str, str], tmp_path: Path) -> None:
    arguments = arguments_of(tmp_path, **inputs)
    found = command.make_context("check", [*arguments]).params

    assert found["configs"] == tuple(inputs["CONFIGS"].split())
    assert found["form"] == "github"
    assert found["diff"] == ("BASE" in inputs)
    assert found["base"] == inputs.get("BASE", "HEAD")
    assert found["junit"] == inputs.get("JUNIT")
    assert found["twice"] == ("OPTIONS" in inputs)


def test_each_input_of_the_action_is_used() -> None:
    action = read("action.yml")
    used = [value for step in action["runs"]["steps"] for value in step["env"].values()]

    assert sorted(used) == sorted(f"${{{{ inputs.{name} }}}}" for name in action["inputs"])


def test_the_project_checks_all_its_presets_with_both() -> None:
    (job,) = read(".github/workflows/check.yml")["jobs"].values()
    own = job["steps"][-1]
    hooks = read(".pre-commit-config.yaml")["repos"][0]["hooks"]
    (hook,) = (hook for hook in hooks if hook["id"] == "aot-lora-check")

    assert own["uses"] == "./"
    assert tuple(own["with"]["configs"].split()) == preset_names()
    assert tuple(hook["args"]) == preset_names()


def test_the_hook_is_what_it_offers_to_others() -> None:
    (offered,) = read(".pre-commit-hooks.yaml")

    assert offered["entry"] == "aot-lora check"
    with pytest.raises(click.UsageError):  # Which configs is for `args` to say.
        command.make_context("check", [])
