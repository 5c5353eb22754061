"""Run by Python at start-up in each process under `aot-lora capture`: see `bootstrap`."""

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120


def _start() -> None:
    path = os.path.join(os.path.dirname(_HERE), "bootstrap.py")  # noqa: PTH118, PTH120
    spec = importlib.util.spec_from_file_location("_aot_lora_bootstrap", path)
    assert spec is not None
    assert spec.loader is not None
    bootstrap = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bootstrap)
    folder = os.environ.get(bootstrap.VARIABLE)
    if folder:
        bootstrap.start(folder)


def _run_the_users() -> None:
    """The `sitecustomize` that would have been found without this folder."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]  # noqa: PTH100
    own = sys.modules.pop("sitecustomize")
    try:
        import sitecustomize  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
    finally:
        sys.modules.setdefault("sitecustomize", own)


_start()
_run_the_users()
