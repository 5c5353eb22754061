"""`aot-lora check`: what moves a trace, by which cause, and how it is said."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aot_lora.checking import check as checking
from aot_lora.cli import check as verb
from aot_lora.cli.check_report import Checked, report
from aot_lora.cli.main import run
from aot_lora.errors import EXIT_CHECK, EXIT_OK, EXIT_USAGE, ConfigError
from aot_lora.lowering.compare import Comparison, Group, Moved
from aot_lora.lowering.lock import LockLine

sys.path.insert(0, str(Path(__file__).parents[1] / "tools/bench"))
from check_edits import BENIGN, HARMFUL, Edit, copy_engine

pytestmark = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)

Check = Callable[..., tuple[int, str, str]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Check:
    """Runs the verb on the configs of a folder, whose modules are imported anew."""
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    # An edit of the same length within a second is none by the time in a .pyc file.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    def check(root: Path, *options: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "path", sys.path[:])
        for name in list(sys.modules):
            if name.partition(".")[0] == "engine":
                monkeypatch.delitem(sys.modules, name)
        capfd.readouterr()
        code = run(["check", *map(str, sorted(root.glob("*.yaml"))), *options])
        return code, *capfd.readouterr()

    return check


# --- Edits of an engine with kernels for TPUs and GPUs -------------------------------------------


GPU = ", {platform: cuda, topology: h200}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The engine's configs and locks, by file name. Its GPU is for `tools/bench/check.py edits`."""
    root = tmp_path_factory.mktemp("locked")
    copy_engine(root)
    config = root / "one.yaml"
    text = config.read_text()
    assert GPU in text
    config.write_text(text.replace(GPU, ""))
    os.environ["JAX_PLATFORMS"] = "cpu"
    assert run(["check", "--update", *map(str, sorted(root.glob("*.yaml")))]) == EXIT_OK
    return {path.name: path.read_text() for path in root.iterdir() if path.is_file()}


@pytest.fixture
def copy(engine: dict[str, str], tmp_path: Path) -> Path:
    root = tmp_path / "copy"
    copy_engine(root)
    for name, text in engine.items():
        (root / name).write_text(text)
    return root


# Those whose texts the others leave as they are; `tools/bench/check.py edits` makes each alone,
# and those of the environment.
TOGETHER = [edit for edit in BENIGN if edit.changes and "reordered" not in edit.name]


def test_benign_edits_move_nothing(copy: Path, check: Check) -> None:
    """CASES 28."""
    assert len(TOGETHER) == 14
    for edit in sorted(TOGETHER, key=lambda edit: "renamed" in edit.name):
        edit.apply(copy)  # Names last, for the others are found by them.

    code, out, err = check(copy)

    assert (code, err) == (EXIT_OK, "")
    assert "2 variants, 2 stable, 0 moved" in out


@pytest.mark.parametrize(
    "edit",
    [e for e in HARMFUL if not e.environ and "compiler" not in e.name][::3],
    ids=lambda edit: edit.name,
)
def test_a_harmful_edit_is_named_with_its_cause(edit: Edit, copy: Path, check: Check) -> None:
    """CASES 29 and 30."""
    edit.apply(copy)
    code, _, err = check(copy)

    assert code == EXIT_CHECK
    assert edit.cause in err


def test_an_option_of_jax_is_a_cause_only_where_something_moved(
    copy: Path, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "default")  # Read when jax is imported.
    assert check(copy)[0] == EXIT_OK
    HARMFUL[0].apply(copy)

    assert "options: +JAX_DEFAULT_MATMUL_PRECISION=default; kernel scale_rows" in check(copy)[2]


def test_a_diff_shows_the_ir_of_what_moved_against_a_revision(copy: Path, check: Check) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", "-C", str(copy), *who, *arguments], check=True, capture_output=True)

    git("init")
    git("add", ".")
    git("commit", "-m", "base")
    (copy / "mesh.yaml").unlink()
    HARMFUL[0].apply(copy)
    code, _, err = check(copy, "--diff")

    assert code == EXIT_CHECK
    assert "IR of tpu v6e:1x1 mix/t128-l0, base -> here:" in err
    changed = [line.strip() for line in err.splitlines() if line.strip().startswith(("- ", "+ "))]
    assert [line[0] for line in changed] == ["-", "+"]
    assert "value = 2.000000e+00" in changed[0]
    assert "value = 3.000000e+00" in changed[1]
    assert "no such base" in check(copy, "--diff", "--base", "no-such-revision")[2]


# --- Traced twice --------------------------------------------------------------------------------

RESTLESS = """\
import os
import random
import time

import jax
import jax.numpy as jnp
import numpy as np

from aot_lora import Program

NAMES = {"gate", "up", "down", "out", "query", "key"}


def over(make):
    return lambda point, context: Program(fn=make(), args=(context.array(point.tokens),))


def of_a_set(x):
    for name in NAMES:
        x = jnp.sin(x) if len(name) == 2 else jnp.cos(x)
    return x


steady = over(lambda: jnp.sin)
hashed = over(lambda: of_a_set)
timed = over(lambda: lambda x: x * np.float32(time.time_ns() % 2**20))
lengths = over(lambda: lambda x: (x, jnp.zeros(random.randrange(2**10))))
placed = over(lambda: lambda x: x + len(os.getcwd()))


def printing(x):
    jax.debug.print("{}", x)
    return x


printed = over(lambda: printing)
"""


@pytest.mark.once
def test_what_differs_from_process_to_process_is_named_with_what_makes_it(
    write_config: Callable[..., Path], tmp_path: Path, check: Check
) -> None:
    (tmp_path / "restless.py").write_text(RESTLESS)
    names = ["steady", "hashed", "timed", "lengths", "placed", "printed"]
    entries = ", ".join(f"{{entry: 'restless:{name}'}}" for name in names)
    path = write_config(programs=f"[{entries}]", lora="{ranks: [8], slots: [0], max_adapters: 1}")
    path.with_suffix(".lock.json").write_text('{"format": 2, "plan": "", "traces": {}}')

    code, out, _ = check(tmp_path, "--twice", "--format", "json")

    assert code == EXIT_CHECK
    found = [json.loads(line) for line in out.splitlines()]
    differing = {
        one["traced_twice"]["name"].partition("/")[0]: one["traced_twice"]
        for one in found
        if "traced_twice" in one
    }
    assert set(differing) == {"cpu hashed", "cpu timed", "cpu lengths", "cpu placed"}
    whys = {name: one["why"].partition(":")[0] for name, one in differing.items()}
    assert whys == {
        "cpu hashed": "the hash seed",
        "cpu timed": "every process",
        "cpu lengths": "every process",
        "cpu placed": "the working directory",
    }
    assert differing["cpu timed"]["what"].startswith("other values of constants")
    assert differing["cpu hashed"]["what"].startswith("the same operations in another order")
    assert differing["cpu lengths"]["what"].startswith("result 1: f32[")
    (printed,) = (one for one in found if "untraced" in one)
    assert printed["untraced"] == "cpu printed/t8-l0"
    assert "calls back into Python" in printed["error"]


# --- Programs and configs that are wrong ---------------------------------------------------------


def test_a_program_that_raises_is_named_with_its_traceback_and_the_rest_is_checked(
    write_config: Callable[..., Path], tmp_path: Path, check: Check
) -> None:
    (tmp_path / "raising.py").write_text(
        "from aot_lora import Program\n\n\n"
        "def layer(x):\n    raise ValueError('no such layer')\n\n\n"
        "def step(point, context):\n"
        "    return Program(fn=lambda x: layer(x), args=(context.array(4),))\n"
    )
    path = write_config()
    assert check(tmp_path, "--update")[0] == EXIT_OK
    write_config(programs="[lora, {entry: 'raising:step'}]")
    code, out, err = check(tmp_path)

    assert code == EXIT_CHECK
    assert f"{path.with_suffix('.lock.json')}: 16 variants, 13 stable" in out
    assert "cpu step/t8-l0, cpu step/t8-l8, cpu step/t8-l16: cannot be traced: ValueError" in err
    assert f'File "{tmp_path}/raising.py", line 5, in layer' in err
    assert "site-packages" not in err


def test_one_bad_config_of_many_leaves_the_others_checked(
    write_config: Callable[..., Path], tmp_path: Path, check: Check
) -> None:
    write_config(name="good.yaml")
    assert check(tmp_path, "--update")[0] == EXIT_OK
    write_config(name="bad.yaml", model="no-such-model")
    code, out, err = check(tmp_path)

    assert code == EXIT_USAGE
    assert "good.lock.json: 13 variants, 13 stable" in out
    assert "no-such-model" in err


def test_a_lock_of_another_config_is_said_to_be(
    write_config: Callable[..., Path], tmp_path: Path, check: Check
) -> None:
    write_config(model="{q_proj: [32, 16]}")
    assert check(tmp_path, "--update")[0] == EXIT_OK
    write_config(model="{q_proj: [16, 8]}")

    code, _, err = check(tmp_path)
    assert code == EXIT_CHECK
    assert "the lock has nothing in common with this plan: is it another config's?" in err


# --- The cache -----------------------------------------------------------------------------------


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A line for each time that a plan was traced."""
    made: list[str] = []
    traced = checking._traced_here
    monkeypatch.setattr(
        checking, "_traced_here", lambda config: made.append(config.path.name) or traced(config)
    )
    return made


def test_what_was_traced_is_traced_again_only_where_something_changed(
    write_config: Callable[..., Path], tmp_path: Path, check: Check, traces: list[str]
) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine/__init__.py").write_text("")
    step = (
        "import jax.numpy as jnp\nfrom aot_lora import Program\n\n\n"
        "def step(point, context):\n"
        "    return Program(fn=jnp.sin, args=(context.array(4),))\n"
    )
    (tmp_path / "engine/steps.py").write_text(step)
    write_config(programs="[{entry: 'engine.steps:step'}]")
    assert check(tmp_path, "--update")[0] == EXIT_OK
    assert len(traces) == 1
    assert check(tmp_path)[0] == EXIT_OK
    assert len(traces) == 1

    assert check(tmp_path, "--no-cache")[0] == EXIT_OK
    assert len(traces) == 2

    (tmp_path / "engine/steps.py").write_text(step.replace("sin", "cos"))
    assert check(tmp_path)[0] == EXIT_CHECK
    assert len(traces) == 3
    assert check(tmp_path)[0] == EXIT_CHECK
    assert len(traces) == 3


@pytest.mark.parametrize("damage", [b"", b"{}", b"0" * 64 + b"\n{}", None])
def test_a_damaged_cache_is_ignored_and_mended(
    damage: bytes | None, tiny_config: Path, check: Check, traces: list[str]
) -> None:
    assert check(tiny_config.parent, "--update")[0] == EXIT_OK
    (file,) = (tiny_config.parent / "store/checks").glob("*.json")
    whole = file.read_bytes()
    file.write_bytes(whole.replace(b'"fingerprint": "', b'"fingerprint": "0', 1))
    if damage is not None:
        file.write_bytes(damage)

    assert check(tiny_config.parent)[0] == EXIT_OK
    assert len(traces) == 2
    assert file.read_bytes() == whole


def test_a_file_of_another_package_that_was_imported_counts(
    write_config: Callable[..., Path], tmp_path: Path, check: Check, traces: list[str]
) -> None:
    """Nothing names it as a source, so the identity of a warmup does not know of it."""
    for name in ("engine", "helpers_of_the_engine"):
        (tmp_path / name).mkdir()
    helper = tmp_path / "helpers_of_the_engine/__init__.py"
    helper.write_text("import jax.numpy as jnp\nfn = jnp.sin\n")
    (tmp_path / "engine/__init__.py").write_text(
        "from aot_lora import Program\nfrom helpers_of_the_engine import fn\n\n\n"
        "def step(point, context):\n    return Program(fn=fn, args=(context.array(4),))\n"
    )
    write_config(programs="[{entry: 'engine:step'}]")
    assert check(tmp_path, "--update")[0] == EXIT_OK
    helper.write_text("import jax.numpy as jnp\nfn = jnp.cos\n")
    sys.modules.pop("helpers_of_the_engine")

    assert check(tmp_path)[0] == EXIT_CHECK
    assert len(traces) == 2
    sys.modules.pop("helpers_of_the_engine")


def test_processes_on_all_cores_trace_what_one_does(
    tiny_config: Path, check: Check, monkeypatch: pytest.MonkeyPatch, traces: list[str]
) -> None:
    assert check(tiny_config.parent, "--update")[0] == EXIT_OK
    monkeypatch.setattr(checking, "_PER_PROCESS", 1)
    monkeypatch.setattr(checking, "usable_cores", lambda: 2)

    assert check(tiny_config.parent, "--no-cache")[0] == EXIT_OK
    assert len(traces) == 1


# --- How it is said ------------------------------------------------------------------------------

OLD = LockLine(fingerprint="1", signature="x: f32[4] -> f32[4]")
NEW = LockLine(fingerprint="2", signature="x: f32[4] -> f32[4]")


@pytest.fixture
def checked(tmp_path: Path) -> list[Checked]:
    names = tuple(f"cpu step/t{size}" for size in range(3))
    found = Comparison(
        stable=("cpu a",),
        moved=tuple(Moved(name=name, locked=OLD, now=NEW) for name in names),
        missing=("cpu gone",),
        new=(),
        stale=(),
    )
    groups = (
        Group(kind="moved", cause="code moved <here>, 100 %", names=names, detail="x: f32[4]"),
        Group(kind="missing", cause="gone", names=("cpu gone",)),
    )
    error = ConfigError("the lock is empty", where="b.lock.json")
    return [
        Checked(name=str(tmp_path / "a.lock.json"), found=found, groups=groups),
        Checked(name="b.yaml", error=error),
    ]


def test_json_ends_with_the_totals(
    checked: list[Checked], capsys: pytest.CaptureFixture[str]
) -> None:
    report(checked, "json", None)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    assert [line.get("kind") for line in lines] == ["moved", "missing", None, None]
    assert lines[-1] == {
        "variants": 5,
        "stable": 1,
        "moved": 3,
        "missing": 1,
        "stale": 0,
        "new": 0,
    }


def test_junit_has_a_case_for_each_variant(checked: list[Checked], tmp_path: Path) -> None:
    report(checked, "human", tmp_path / "check.xml")
    root = ElementTree.parse(tmp_path / "check.xml").getroot()
    suites = [(s.get("tests"), s.get("failures"), s.get("errors")) for s in root]

    assert suites == [("5", "4", "0"), ("1", "0", "1")]
    failure = root.find(".//testcase[@name='step/t0']/failure")
    assert failure is not None
    assert failure.get("message") == "moved: code moved <here>, 100 %"
    assert failure.text == "x: f32[4]"


def test_github_gets_an_annotation_for_each_cause_at_its_line(
    checked: list[Checked],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path))
    (tmp_path / "a.lock.json").write_text('{\n   "step/t0": {}\n')
    report(checked, "github", None)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("::")]

    assert lines == [
        "::error file=a.lock.json,line=2,title=aot-lora check%3A 3 moved::3 moved: code moved "
        "<here>, 100 %25%0Ax: f32[4]%0Acpu step/t0%0Acpu step/t1%0Acpu step/t2",
        "::error file=a.lock.json,line=1,title=aot-lora check%3A 1 missing::1 missing: gone"
        "%0Acpu gone",
        "::error file=b.yaml,title=aot-lora check::b.lock.json: the lock is empty",
    ]


def test_github_is_the_default_where_github_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    (form,) = (option for option in verb.command.params if option.name == "form")
    assert callable(form.default)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert form.default() == "human"
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert form.default() == "github"
