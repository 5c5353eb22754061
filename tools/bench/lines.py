"""What every benchmark prints: one JSON object a line, with what it takes to repeat it."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # this checkout, not an installed copy

_PACKAGES = ("aot-lora", "jax", "jaxlib", "libtpu", "numpy")


def child_environment(**more: str) -> dict[str, str]:
    """The environment of a timed process: this checkout, the CPU, bytecode cached as installed."""
    dropped = ("PYTHONDONTWRITEBYTECODE", "AOT_LORA_CACHE", "JAX_PLATFORMS")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    path = os.pathsep.join(filter(None, (str(ROOT), kept.get("PYTHONPATH"))))
    return {**kept, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **more}


def note(text: str) -> None:
    """Says what is going on, on stderr."""
    sys.stderr.write(text + "\n")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def emit(
    *,
    case: str,
    metric: str,
    value: float,
    unit: str,
    peer: str | None = None,
    peer_value: float | None = None,
) -> None:
    """Prints one result.

    Args:
      case: what was run, for instance ``warm_start/cpu-200``.
      metric: what was measured.
      value: ours, in `unit`.
      unit: ``s``, ``us``, ``bytes``, or ``1`` for a share.
      peer: what it was compared with in the same run.
      peer_value: the peer's, in the same unit.
    """
    line = {
        "case": case,
        "metric": metric,
        "value": _rounded(value),
        "unit": unit,
        "peer": peer,
        "peer_value": None if peer_value is None else _rounded(peer_value),
        "ratio": None if not peer_value else _rounded(value / peer_value),
        "versions": _versions(),
        "hardware": {"cpu": _cpu_model(), "cores": cores()},
        "command": _command(),
    }
    print(json.dumps(line), flush=True)


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.4g}")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _command() -> str:
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return shlex.join(["python", script.as_posix(), *sys.argv[1:]])
