"""The first steps in a process that is recorded: nothing but the standard library, any Python 3.

`site/sitecustomize.py` loads this file by its path; Python runs that one at start-up because
`aot-lora capture` puts its folder into PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "AOT_LORA_CAPTURE"
"""The environment variable that names the folder of the records."""
_OURS = "aot_lora._jax_compat"


def start(folder: str) -> None:
    """Records this process, from the moment that it has imported jax."""
    append(folder, {"event": "python"})
    when_jax_is_imported(lambda: _record(folder))


def append(folder: str, event: dict[str, Any]) -> None:
    """Adds a line to this process's records, at once: what is written outlives a kill."""
    line = (json.dumps(event) + "\n").encode()
    try:  # Opened each time: a forked child writes to a file of its own.
        path = os.path.join(folder, f"{os.getpid()}.jsonl")  # noqa: PTH118
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(file, line)
        finally:
            os.close(file)
    except OSError:  # The folder is gone: nobody waits for this process any more.
        pass


def when_jax_is_imported(then: Callable[[], None]) -> Callable[[], None]:
    """Calls `then` as soon as jax has been imported; now, where it has been.

    Where our own code is what imports it, that must be whole before `then` can use it.

    Returns:
      What stops waiting for it.
    """
    if "jax" in sys.modules:
        then()
        return lambda: None
    finders: list[_Finder] = []

    def stop() -> None:
        for finder in finders:
            if finder in sys.meta_path:
                sys.meta_path.remove(finder)

    def begin() -> None:
        stop()
        then()

    finders += [
        _Finder("jax", lambda: None if _OURS in sys.modules else begin()),
        _Finder(_OURS, begin),
    ]
    sys.meta_path[:0] = finders
    return stop


def _record(folder: str) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - the program's Python, not ours
        text = "cannot record: it is Python {}.{}, and 3.11 or newer is needed"
        append(folder, {"event": "trouble", "text": text.format(*sys.version_info[:2])})
        return
    try:
        _find_package()
        from aot_lora.capture import child

        child.record(folder)
    except Exception as error:  # The program must run as if nobody looked on.
        text = f"cannot record: {type(error).__name__}: {error}"
        append(folder, {"event": "trouble", "text": text})


def _find_package() -> None:
    """Makes this copy of aot_lora importable where the program's environment has none."""
    if importlib.util.find_spec("aot_lora") is not None:
        return
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    init = os.path.join(root, "__init__.py")  # noqa: PTH118
    spec = importlib.util.spec_from_file_location(
        "aot_lora", init, submodule_search_locations=[root]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["aot_lora"] = module
    spec.loader.exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds a module as the others do, and sees the end of its import."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec is not None), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                if self in sys.meta_path:
                    self._then()

            loader.exec_module = exec_module
        return spec
