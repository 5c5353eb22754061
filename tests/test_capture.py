"""`aot-lora capture` on programs that know nothing of aot-lora, each in processes of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from serving import wait_for

from aot_lora import errors
from aot_lora.cli.main import run

ROOT = Path(__file__).parents[1]

STEP = """\
import os, sys
from functools import partial
import numpy as np
import jax

@partial(jax.jit, static_argnames="n", donate_argnums=1)
def step(x, y, n=1, *, p):
    return x * n + p["q"], y + 1

def main(*sizes):
    for size in sizes:
        x, y = (jax.device_put(np.ones((size, 2), np.float32)) for _ in "xy")
        step(x, y, n=2, p={"q": 2.0})
"""


class Captured:
    """A run of the command line: its exit code and streams."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def report(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])


Capture = Callable[..., Captured]


@pytest.fixture
def capture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Capture:
    """Runs `aot-lora capture`, here, on a program in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # The program's copy: with four devices it would compile for one as well.
    monkeypatch.delenv("XLA_FLAGS", raising=False)

    def capture(options: str, text: str, *arguments: str, python: str = "") -> Captured:
        Path("program.py").write_text(text)
        command = [sys.executable, *python.split(), "program.py", *arguments]
        code = run(["capture", *options.split(), "--", *command])
        return Captured(code, *capfd.readouterr())

    return capture


CHILD = f"""{STEP}
import multiprocessing
if __name__ == "__main__":
    print("the program's own output", flush=True)
    if sys.argv[1] != "alone":
        child = multiprocessing.get_context(sys.argv[1]).Process(target=main, args=(3, 4))
        child.start()
        child.join()
    main(*map(int, sys.argv[2:]))
"""


@pytest.mark.once
def test_a_lock_holds_what_was_compiled_and_fails_for_anything_else(capture: Capture) -> None:
    done = capture("-o own.lock", CHILD, "spawn", "3")
    assert (done.code, done.err) == (0, "wrote own.lock\n")
    assert done.out.startswith("the program's own output\n")
    assert "3 compiles and 0 cache hits of 2 programs in 2 processes" in done.out
    assert "2nd: x: f32[4,2], shape was [3,2]; y: f32[4,2], shape was [3,2]" in done.out
    text = Path("own.lock").read_text()
    assert str(Path.cwd()) not in text
    lines = json.loads(text)["compiles"]
    assert [line["count"] for line in lines] == [1, 1]
    assert lines[0]["arguments"] == [
        {"name": "x", "type": "f32[3,2]"},
        {"name": "y", "type": "f32[3,2]", "donated": True},
        {"name": "p['q']", "type": "~f32[]", "kind": "Python float"},
    ]

    # Fewer programs here and another kind of child: a forked one goes on with what there is.
    done = capture("--against own.lock -o other.lock", CHILD, "fork", "4")
    assert done.code == errors.EXIT_OK, done.out
    assert "all in the lock, which holds 2 programs" in done.out
    assert Path("other.lock").read_text() == text

    done = capture("--against own.lock --format json", CHILD, "alone", "4", "5")
    assert done.code == errors.EXIT_CHECK
    (new,) = done.report["new"]
    assert new["function"] == "step"
    assert new["nearest"] == "x: f32[4,2], y: f32[4,2], p['q']: a Python float, n=2"
    assert new["why"] == "x: f32[5,2], shape was [4,2]; y: f32[5,2], shape was [4,2]"
    assert new["frames"] == ["program.py:13 main", "program.py:22 <module>"]


def test_hits_of_jaxs_own_cache_are_no_compiles(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "cache")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
    counts = [
        (found["compiles"], found["cache_hits"], found["programs"])
        for found in (capture("--format json", f"{STEP}main(3, 4)").report for _ in range(2))
    ]

    assert counts == [(2, 0, 2), (0, 2, 2)]


@pytest.mark.parametrize(
    ("end", "code", "unfinished"),
    [
        ("os.kill(os.getpid(), 9)", 128 + signal.SIGKILL, 0),
        (
            "import jax._src.compiler as c\n"
            "c.backend_compile_and_load = lambda *_: os._exit(6)\nmain(4)",
            6,
            1,
        ),
    ],
    ids=["killed", "ended inside of XLA"],
)
def test_a_process_that_ends_early_leaves_what_it_had_compiled(
    end: str, code: int, unfinished: int, capture: Capture
) -> None:
    """And its exit code comes before that of a lock that does not hold."""
    Path("empty.lock").write_text('{"format": 1, "jax": ["0"], "compiles": []}')
    options = "--against empty.lock -o early.lock --format json"
    done = capture(options, f"{STEP}main(3)\n{end}")

    assert done.code == done.report["exit_code"] == code
    assert [one["why"] for one in done.report["new"]] == ["the lock holds nothing by this name"] * (
        1 + unfinished
    )
    assert done.report["compiles"] == 1 + unfinished
    assert done.report["unfinished"] == unfinished
    assert f"wrote early.lock; only up to the end of the command, by exit code {code}" in done.err


def test_a_program_of_our_own_is_recorded_as_well(capture: Capture) -> None:
    """There our own code, not yet whole, is what imports jax."""
    text = "import aot_lora._jax_compat, jax; jax.jit(lambda x: x + 1)(1.0)"
    assert capture("--format json", text).report["compiles"] == 1


def test_a_lock_that_would_not_be_whole_is_not_written(capture: Capture) -> None:
    text = f"{STEP}import aot_lora.capture.child as c\nmain(3)\nc.describe = None\nmain(4)"
    done = capture("-o part.lock --format json", text)

    assert done.code == errors.EXIT_UNSUPPORTED
    assert done.report["compiles"] == 1
    assert "not wholly, recorded: cannot describe a compile: TypeError: 'NoneType'" in done.err
    assert "part.lock is left as it was" in done.err
    assert not Path("part.lock").exists()


def test_what_comes_more_often_than_in_the_lock_is_named(capture: Capture) -> None:
    """The program's last line of output is open, and the report on a line of its own."""
    again = "print('done', end='')\nfor _ in range(int(sys.argv[1])): jax.jit(lambda x: -x)(1.0)\n"
    assert capture("-o one.lock", STEP + again, "1").code == 0
    done = capture("--against one.lock --format json", STEP + again, "3")

    assert done.code == errors.EXIT_CHECK
    (new,) = done.report["new"]
    assert new["why"] == (
        "3 times in one process, the lock holds 1: the same program again: its function is a new"
        " object (jax.jit inside of a loop or call?)"
    )


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_signals_are_passed_on(sent: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(
        "import signal, sys, pathlib\n"
        "def stop(number, frame):\n"
        "    print('stopped by', number)\n"
        "    sys.exit(5)\n"
        f"signal.signal({int(sent)}, stop)\n"
        "pathlib.Path('ready').touch()\n"
        "while True: signal.pause()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "aot_lora", "capture", "--", sys.executable, "server.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_for((tmp_path / "ready").exists)
    process.send_signal(sent)

    assert process.communicate(timeout=60)[0].startswith(f"stopped by {int(sent)}\n")
    assert process.returncode == 5


TERMINAL = """
import os, pty, sys
child, terminal = pty.fork()
if child == 0:
    os.execv(sys.executable, [sys.executable, "-m", "aot_lora", "capture", "--", *sys.argv[1:]])
try:
    while printed := os.read(terminal, 1000):
        if b"ready" in printed:
            os.write(terminal, b"\\x03")
        sys.stdout.buffer.write(printed)
except OSError:  # Linux says so once the other side is closed.
    pass
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_key_of_the_terminal_reaches_the_command_once(tmp_path: Path) -> None:
    """The terminal sends it to both processes."""
    (tmp_path / "server.py").write_text(
        "import os, signal, time\n"
        # Not print: the key may come before the one below has returned.
        "signal.signal(signal.SIGINT, lambda *_: os.write(1, b'interrupted\\n'))\n"
        "print('ready', flush=True)\n"
        "for _ in range(10): time.sleep(0.1)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", TERMINAL, sys.executable, "server.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.count("interrupted") == 1


@pytest.mark.parametrize(
    ("python", "text", "why"),
    [
        ("", "print(1)", "no process imported jax"),
        ("-I", "print(1)", "no Python was seen: the command starts none, or one that ignores"),
        ("", "import jax", "cannot record: ModuleNotFoundError: No module named 'jax._src'"),
        (
            "",
            "import sys; sys.version_info = (3, 9); import jax",
            "cannot record: it is Python 3.9, and 3.11 or newer is needed",
        ),
    ],
    ids=["no jax", "no PYTHONPATH", "an unknown jax", "an old Python"],
)
def test_a_run_that_could_not_be_recorded_says_so(
    python: str, text: str, why: str, capture: Capture
) -> None:
    Path("jax.py").touch()  # One that is not known, and is loaded at once.
    done = capture("-o none.lock", text, python=python)

    assert done.code == (errors.EXIT_UNSUPPORTED if "cannot" in why else errors.EXIT_CHECK)
    assert "0 compiles and 0 cache hits of 0 programs in 0 processes" in done.out
    assert f"nothing was recorded: {why}" in done.err
    assert "none.lock is left as it was" in done.err
    assert not Path("none.lock").exists()


def test_the_programs_environment_stays_its_own(
    capture: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its `sitecustomize` runs, its sys.path is what it was, and jax is looked for as ever."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own/sitecustomize.py").write_text("import sys; sys.customized = __file__")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "own"), str(ROOT)]))
    done = capture(
        "",
        "import sys, importlib.util as u\n"
        "print(sys.customized, sys.modules['sitecustomize'].__file__)\n"
        "print(u.find_spec('jax').name, [p for p in sys.path if p.endswith('capture/site')])",
    )
    own = str(tmp_path / "own/sitecustomize.py")
    assert done.code == 0
    assert done.out.splitlines()[:2] == [f"{own} {own}", "jax []"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no command: aot-lora capture [options] -- python -m my_server"),
        (["--", "no-such-command"], "no-such-command: the command cannot be started: No such file"),
        (["-o", "nowhere/x.lock", "--", "true"], "nowhere/x.lock: its folder is not there"),
        (["--against", "x.lock", "--", "true"], "x.lock: there is no lock"),
    ],
)
def test_wrong_use_is_refused_before_anything_runs(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    absent = "there is no lock" in says
    code = run(["capture", *arguments])

    assert code == (errors.EXIT_CHECK if absent else errors.EXIT_USAGE)
    assert says in capsys.readouterr().err


def test_a_python_without_aot_lora_is_given_this_copy() -> None:
    code = (
        "import importlib.util as u, sys\n"
        f"spec = u.spec_from_file_location('b', {str(ROOT / 'aot_lora/capture/bootstrap.py')!r})\n"
        "b = u.module_from_spec(spec); spec.loader.exec_module(b)\n"
        "b._find_package(); import aot_lora.capture.records as r; print(r.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(ROOT / "aot_lora/capture/records.py")
