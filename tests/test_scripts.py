"""tools/run and tools/test: finding Python, making and mending the venv, handing over.

Each test runs a copy of the scripts in a checkout of its own, with a stand-in for Python that
writes down what pip was asked for. Nothing is installed.
"""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("tools/run", "tools/test", "tools/_venv.sh", ".ci/run")
BASH = shutil.which("bash") or "bash"

STAND_IN = """#!{bash}
case "$*" in
  *_base_executable*) {reports} ;;
  *"import venv, ensurepip"*) exit {ensurepip} ;;
  "-m venv "*) mkdir -p "${{@: -1}}/bin" && cp "$0" "${{@: -1}}/bin/python" ;;
  "-m pip --version") exit {pip} ;;
  "-m pip "*)
    echo "pip chatter"
    echo "$*" >>'{log}'
    if [[ -e '{log}.fail' ]]; then exit 1; fi
    printf '%s\\n' '#!{bash}' 'printf "<%s>" "$@"' >"${{0%/*}}/aot-lora"
    chmod +x "${{0%/*}}/aot-lora" ;;
  *) exec '{real}' "$@" ;;
esac
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    root: Path
    bin: Path
    log: Path

    def python(self, *, name: str = "python3", new: bool = True, venv: bool = True) -> None:
        """Puts a stand-in on PATH: >= 3.11 if `new`; with a whole venv module if `venv`."""
        text = STAND_IN.format(
            bash=BASH,
            reports=f"echo '{self.bin / name}'" if new else "exit 1",
            ensurepip=0 if venv else 1,
            pip=1,
            log=self.log,
            real=sys.executable,
        )
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(self, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [BASH, str(self.root / "tools/run"), *args],
            env={"PATH": str(self.bin), **env},
            cwd=self.bin,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def installs(self) -> list[str]:
        """What each `pip install` was given after its options."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.partition(" -e ")[2].removeprefix(str(self.root)) for line in lines]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(root=tmp_path / "a checkout", bin=tmp_path / "bin", log=tmp_path / "pip.log")
    shutil.copytree(ROOT / "tools", made.root / "tools")
    for preset, platform in (("cpu/quickstart", "cpu"), ("tpu-v6e/some-model", "tpu")):
        path = made.root / f"buckets/{preset}.yaml"
        path.parent.mkdir(parents=True)
        path.write_text(f"# platform: tpu is a comment\ntarget: {{platform: {platform}}}\n")
    (made.root / "pyproject.toml").write_text("# as first installed\n")
    made.bin.mkdir()
    for command in ("chmod", "cp", "dirname", "flock", "grep", "mkdir", "readlink", "rm"):
        if found := shutil.which(command):
            (made.bin / command).symlink_to(found)
    return made


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    subprocess.run([BASH, "-n", str(ROOT / script)], check=True)
    assert os.access(ROOT / script, os.X_OK) == (script != "tools/_venv.sh")


def test_no_python_is_one_line_that_says_what_to_install(checkout: Checkout) -> None:
    checkout.python(new=False)

    done = checkout.run("plan")

    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr == (
        "tools/run: needs Python >= 3.11 and finds none. Install one, for example with "
        "`apt install python3.11 python3.11-venv`, or set PYTHON=/path/to/python3\n"
    )


def test_an_old_python3_is_passed_over(checkout: Checkout) -> None:
    checkout.python(new=False)
    checkout.python(name="python3.12")

    assert checkout.run("plan").returncode == 0
    assert (checkout.root / ".venv/bin/aot-lora").exists()


def test_a_python_that_was_asked_for_is_not_replaced_by_another(checkout: Checkout) -> None:
    checkout.python()

    done = checkout.run("plan", PYTHON="/nowhere/python3")

    assert done.returncode == 5
    assert "PYTHON=/nowhere/python3 is not a Python >= 3.11" in done.stderr


def test_a_broken_venv_module_names_the_package(checkout: Checkout) -> None:
    checkout.python(venv=False)

    done = checkout.run("plan")

    assert done.returncode == 5
    major, minor = sys.version_info[:2]
    assert f"`apt install python{major}.{minor}-venv` (as root)" in done.stderr
    assert not (checkout.root / ".venv").exists()


def test_arguments_arrive_whole_and_stdout_is_only_theirs(checkout: Checkout) -> None:
    checkout.python()

    done = checkout.run("warmup", "a b.yaml", "--", "", "*", "--x=$y")

    assert done.stdout == "<warmup><a b.yaml><--><><*><--x=$y>"
    assert "installing" in done.stderr


def test_nothing_is_installed_twice(checkout: Checkout) -> None:
    checkout.python()

    runs = [checkout.run("plan") for _ in range(2)]

    assert checkout.installs() == [""]
    assert runs[1].stderr == ""


@pytest.mark.parametrize(
    "config",
    [
        "buckets/tpu-v6e/some-model.yaml",
        "tpu-v6e/some-model",
        "--config=buckets/tpu-v6e/some-model.yaml",
    ],
)
def test_a_tpu_config_brings_libtpu_and_it_stays(checkout: Checkout, config: str) -> None:
    checkout.python()

    for arg in ("buckets/cpu/quickstart.yaml", config, "buckets/cpu/quickstart.yaml"):
        assert checkout.run("plan", arg).returncode == 0

    assert checkout.installs() == ["", "[tpu]"]


def test_a_changed_pyproject_is_installed_again_with_the_same_extras(checkout: Checkout) -> None:
    checkout.python()
    checkout.run("plan", "tpu-v6e/some-model")

    (checkout.root / "pyproject.toml").write_text("# as changed\n")
    checkout.run("plan")

    assert checkout.installs() == ["[tpu]", "[tpu]"]


def test_an_interrupted_install_is_mended(checkout: Checkout) -> None:
    checkout.python()
    fail = Path(f"{checkout.log}.fail")
    fail.touch()
    broken = checkout.run("plan")
    left_over = checkout.root / ".venv/left-over"
    left_over.touch()
    fail.unlink()

    mended = checkout.run("plan")

    assert (broken.returncode, broken.stdout) == (1, "")
    assert "pip failed" in broken.stderr
    assert (mended.returncode, mended.stdout) == (0, "<plan>")
    assert not left_over.exists()


def test_another_python_on_path_does_not_make_it_anew(checkout: Checkout) -> None:
    checkout.python(name="python3.12")
    checkout.run("plan")
    checkout.python(name="python3")

    assert checkout.run("plan").stderr == ""


def test_another_python_that_was_asked_for_does(checkout: Checkout) -> None:
    checkout.python(name="python3.12")
    checkout.run("plan")
    checkout.python(name="python3")

    done = checkout.run("plan", PYTHON=str(checkout.bin / "python3"))

    assert done.returncode == 0
    assert "making .venv with" in done.stderr


def test_a_moved_checkout_does_not_run_the_old_one(checkout: Checkout) -> None:
    checkout.python()
    checkout.run("plan")
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)

    done = Checkout(root=moved, bin=checkout.bin, log=checkout.log).run("plan")

    assert "making .venv" in done.stderr
    assert len(checkout.installs()) == 2
