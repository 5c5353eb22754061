"""The pytest plugin, as another project's tests see it. Each check is also seen to pass."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from aot_lora.cli.main import run as cli

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
PLUGIN = "aot_lora.interop.pytest_plugin"

TESTS = """
import jax, numpy as np, pytest

X = np.ones(3, np.float32)

def double(x, n=2):
    return x * n

@pytest.fixture
def warm():
    f = jax.jit(double, static_argnames="n")
    f(X)
    return f
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # other installs of this plugin


def run(pytester: pytest.Pytester, text: str, *options: object) -> pytest.RunResult:
    """Runs a text's tests in a process of their own."""
    pytester.makepyfile(test_it=TESTS + text)
    return pytester.runpytest_subprocess("-p", PLUGIN, "--strict-markers", "-q", *options)


def lines_in(result: pytest.RunResult, text: str) -> None:
    """Each line of a text, without its indentation, begins or is within one of the output's."""
    printed = result.stdout.str()
    for line in text.strip().splitlines():
        assert line.strip() in printed, f"{line.strip()!r} is not in\n{printed}"


def test_installing_the_package_gives_the_plugin_and_unused_it_loads_nothing() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"aot-lora": PLUGIN}
    code = f"import sys, {PLUGIN}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    heavy = {"jax", "jaxlib", "numpy", "pydantic", "rich", "click", "yaml"}
    assert not heavy & {name.partition(".")[0] for name in done.stdout.split()}


def test_unused_it_imports_no_jax_in_a_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_it="import sys\ndef test(): assert 'jax' not in sys.modules")
    pytester.runpytest_subprocess("-p", PLUGIN).assert_outcomes(passed=1)


def test_a_failing_test_says_what_was_compiled_and_why(pytester: pytest.Pytester) -> None:
    result = run(
        pytester,
        """
def test_forbidden(warm, forbid_compile):
    warm(np.ones(4, np.float32))

def test_swallowed(warm, forbid_compile):
    try:
        warm(np.ones(5, np.float32))
    except Exception:
        pass

def test_kept(warm, forbid_compile):
    warm(X)

@pytest.mark.compiles(max=1)
def test_too_many(warm):
    warm(np.ones(6, np.float32))
    warm(X, n=3)

@pytest.mark.compiles(max=2)
def test_as_many(warm):
    warm(np.ones(7, np.float32))
    warm(X, n=4)

@pytest.mark.compiles(max=0)
def test_fails_on_its_own(warm):
    warm(np.ones(8, np.float32))
    1 / 0

@pytest.mark.compiles(max=0)
def test_jit_in_a_loop():
    for _ in range(2):
        jax.jit(lambda x: x - 1)(X)

@pytest.mark.compiles(max=0)
@pytest.mark.parametrize("n", [1, 2])
def test_of_the_fixture_alone(warm, n):
    warm(X)
""",
    )
    result.assert_outcomes(passed=4, failed=5)
    lines_in(
        result,
        """
        forbid_compile of test_forbidden, called from test_it.py:15: refused to compile `double`
        found: x: f32[4], shape was [3]
        forbid_compile refused 1 compile, and the test went on:
        forbid_compile of test_swallowed, called from test_it.py:19: refused to compile `double`
        2 programs compiled, @pytest.mark.compiles(max=1) allows 1:
        1. double (test_it.py:5) for x: f32[6], n=2
        called from test_it.py:28 test_too_many
        2. double (test_it.py:5) for x: f32[3], n=3
        n: static value 3, was 2
        ZeroDivisionError
        1 program compiled, @pytest.mark.compiles(max=0) allows 0:
        nothing by this name was compiled before
        the same program again: its function is a new object (jax.jit inside of a loop or call?)
        """,
    )


def test_a_marker_that_means_nothing_is_refused(pytester: pytest.Pytester) -> None:
    markers = ("", "3", "max=-1", "max=True", "max='2'", "max=1, min=0")
    tests = [
        f"@pytest.mark.compiles({marker})\ndef test_{n}(): pass\n"
        for n, marker in enumerate(markers)
    ]
    pytester.makepyfile(test_it="import pytest\n" + "".join(tests))
    result = pytester.runpytest_subprocess("-p", PLUGIN, "--strict-markers", "-q")

    result.assert_outcomes(errors=len(markers))
    for marker in markers:
        lines_in(result, f"found: @pytest.mark.compiles({marker})")
    lines_in(result, "expected: @pytest.mark.compiles(max=N), with N a whole number, 0 or more")


def test_the_marker_is_shown_by_pytest(pytester: pytest.Pytester) -> None:
    lines_in(
        pytester.runpytest_subprocess("-p", PLUGIN, "--markers"),
        "@pytest.mark.compiles(max): the test fails if it compiles more than `max` programs",
    )


HELD = """
FIRST = jax.jit(lambda x: x + 1)(np.ones(3, np.float32))  # while tests are collected

def test_one(warm):
    warm(X)

def test_two(warm):
    warm(np.ones(4, np.float32))
"""


def test_with_a_lock_a_run_compiles_what_the_lock_holds_and_nothing_else(
    pytester: pytest.Pytester,
) -> None:
    """The lock is one of `aot-lora capture`: both see the same fingerprints. With xdist too."""
    pytester.makepyfile(test_it=TESTS + HELD)
    assert cli(["capture", "-o", "tests.lock", "--", sys.executable, "-m", "pytest"]) == 0
    assert len(json.loads(Path("tests.lock").read_text())["compiles"]) == 3

    options = ["--aot-lora-lock", "tests.lock"]
    run(pytester, HELD, *options).assert_outcomes(passed=2)
    changed = HELD.replace("ones(3", "ones(9").replace("ones(4", "ones(5")
    result = run(pytester, changed, *options, "-p", "xdist", "-n", "1")
    # What collecting compiled is the first test's error.
    result.assert_outcomes(failed=1, errors=1)
    lines_in(
        result,
        """
        1 program compiled while tests were collected, or between them, not in the lock
        x: f32[9], shape was [3]
        called from test_it.py:14 <module>
        1 program compiled by the test, not in the lock tests.lock:
        1. double (test_it.py:5) for x: f32[5], n=2
        nearest in the lock: x: f32[4], n=2
        x: f32[5], shape was [4]
        called from test_it.py:20 test_two
        next: undo what compiles them, or accept with `aot-lora capture -o tests.lock -- python
        """,
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "x.lock: there is no lock"),
        ("", "x.lock:1:1: the lock is empty"),
        ('{"format": 1}\n<<<<<<< ours\n', "x.lock:2:1: the lock has conflict markers"),
        ('{"format": 2, "jax": [], "compiles": []}', "expected: format 1\n  found: format 2"),
        ('{"format": 1, "plan": "", "traces": {}}', "this is a config's lock; one that `aot-lora"),
        ('{"format": 1, "jax": [], "compiles": [{"function": "f"}]}', "compiles.0.platform"),
    ],
    ids=["absent", "empty", "conflict", "newer", "of a config", "cut by hand"],
)
def test_a_bad_lock_ends_the_run_before_it_begins(
    text: str | None, says: str, pytester: pytest.Pytester
) -> None:
    if text is not None:
        Path("x.lock").write_text(text)
    pytester.makepyfile("def test(): pass")
    result = pytester.runpytest_subprocess("-p", PLUGIN, "--aot-lora-lock", "x.lock")

    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert says in result.stderr.str()
