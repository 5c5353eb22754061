"""Which releases of torch, torchax and torch_xla belong together, checked before any is imported.

Each of them fails late and in its own words otherwise: torchax at import on torch 2.13, torch_xla
with an undefined symbol on any torch but its own.
"""

from __future__ import annotations

import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from aot_lora.errors import UnsupportedError

TORCHAX = "0.0.13"
TORCH_XLA = "2.9.0"
TORCHES = ((2, 9), (2, 12))
"""The first and last torch that torchax 0.0.13 imports on."""
_CPU_TORCH = "on a host without a GPU take the wheel of PyTorch's CPU index"


def require_torchax() -> None:
    """Refuses a host on which torchax cannot be imported.

    Raises:
      UnsupportedError: torch or torchax is missing, or torch is too old or too new.
    """
    first, last = (f"{major}.{minor}" for major, minor in TORCHES)
    expected = f"torch {first} to {last} with torchax {TORCHAX}"
    torch, torchax = _version("torch"), _version("torchax")
    if not torch or not torchax:
        raise UnsupportedError(
            f"{'torchax' if torch else 'torch'} is not installed",
            expected=expected,
            next_step=f"pip install 'aot-lora[torchax]'; {_CPU_TORCH}",
        )
    if not TORCHES[0] <= _minor(torch) <= TORCHES[1]:
        raise UnsupportedError(
            f"torchax {torchax} cannot be imported on this torch",
            expected=expected,
            found=f"torch {torch}",
            next_step=f"pip install 'torch>={first},<{_after(last)}'; {_CPU_TORCH}",
        )


def require_own_files(torchax: Any) -> None:
    """Refuses a torchax of which another package has written over the files.

    torch_xla's wheel brings a torchax 0.0.6, and whichever is installed last wins.

    Args:
      torchax: the imported module.

    Raises:
      UnsupportedError: they are of another release than what is installed.
    """
    if torchax.__version__ != _version("torchax"):
        raise UnsupportedError(
            "the files of torchax are of another release: torch_xla's wheel brings its own",
            expected=f"torchax {_version('torchax')}",
            found=f"torchax {torchax.__version__}",
            next_step=f"pip install --force-reinstall --no-deps torchax=={TORCHAX}, after "
            "torch_xla; or an environment without torch_xla",
        )


def require_torch_xla() -> None:
    """Refuses a host on which torch_xla cannot be imported.

    Raises:
      UnsupportedError: torch or torch_xla is missing or not of the pair that works, or this Python
      has no shared library.
    """
    expected = f"torch {TORCH_XLA} with torch_xla {TORCH_XLA}, its last release"
    step = f"pip install torch=={TORCH_XLA} torch_xla=={TORCH_XLA}, on a TPU VM with [tpu]"
    for name in ("torch", "torch_xla"):
        found = _version(name)
        if found.partition("+")[0] != TORCH_XLA:
            raise UnsupportedError(
                f"not the {name} that works" if found else f"{name} is not installed",
                expected=expected,
                found=f"{name} {found}" if found else None,
                next_step=f"{step}; {_CPU_TORCH}",
            )
    if sys.platform == "linux" and not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        raise UnsupportedError(
            "torch_xla needs a Python with a shared library",
            expected="a libpython that its extension can link",
            found=f"{sys.executable}, built without --enable-shared",
            next_step="take the Python of the distribution or of conda, or build one with "
            "--enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)",
        )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _minor(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


def _after(minor: str) -> str:
    major, last = _minor(minor)
    return f"{major}.{last + 1}"
