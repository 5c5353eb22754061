"""A target's identity as named parts, known without importing jax.

Two hosts with equal parts can run each other's executables; a part that differs is named in
the miss.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from aot_lora.config.gpus import gpu_of
from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec
from aot_lora.programs.options import SILENT_JAX
from aot_lora.targets.environment import HOST_DEVICES

# Device kinds as the TPU compiler's topologies name them; a test asks libtpu for the same.
TPU_KINDS = {
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
_PLUGINS = {
    "cpu": (),
    "cuda": ("jax-cuda13-plugin", "jax-cuda13-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
    "tpu": ("libtpu",),
}
# Flags that say where to write or what to print, and cannot change an executable.
_SILENT_XLA = ("--xla_dump", "--xla_hlo_profile", HOST_DEVICES)


def identity(target: TargetSpec, *, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The named parts of a target on this host with what is installed here.

    Raises:
      UnsupportedError: a package that the target needs is not installed.
    """
    parts = {
        "platform": target.platform,
        # A GPU's is the name of a file, and the file is a part of its own.
        "topology": target.topology if target.platform == "tpu" else "",
        "device kind": device_kind(target),
        "device count": str(target.devices),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
    }
    for package in _PLUGINS[target.platform]:
        version = _version(package, required=target.platform == "tpu")
        if version:
            parts[package] = version
    parts["XLA_FLAGS"] = _flags(environ.get("XLA_FLAGS", ""), _SILENT_XLA)
    if target.platform == "tpu":
        init = environ.get("LIBTPU_INIT_ARGS", "")
        parts["LIBTPU_INIT_ARGS"] = _flags(init, ("--xla_dump", "--xla_jf_dump"))
    parts["JAX environment"] = jax_environment(environ)
    if target.target_config:
        parts["target config"] = hashlib.sha256(target.target_config.encode()).hexdigest()
        parts["autotune results"] = target.autotune
    if target.platform == "cpu":
        parts["CPU features"] = cpu_features()
    return parts


def jax_environment(environ: Mapping[str, str] = os.environ) -> str:
    """JAX's options that may change what is traced or compiled: ``NAME=value``, sorted."""
    return " ".join(
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith("JAX_") and not name.startswith(SILENT_JAX)
    )


def device_kind(target: TargetSpec) -> str:
    """What JAX calls the target's device, as far as that is known without opening one."""
    if target.platform == "tpu":
        return TPU_KINDS[target.topology.partition(":")[0]]
    if target.target_config:
        return gpu_of(target.target_config).name
    return "cpu" if target.platform == "cpu" else gpu_name()


def _flags(text: str, silent: tuple[str, ...]) -> str:
    """The flags that count, sorted; of one given twice, the last, which is the one that holds."""
    text = text.strip()
    if text and not text.startswith("-"):  # Then XLA reads its flags from a file of that name.
        file = Path(text)
        text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    last = {flag.partition("=")[0]: flag for flag in text.split()}
    return " ".join(sorted(flag for flag in last.values() if not flag.startswith(silent)))


def _version(package: str, *, required: bool = True) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        if not required:
            return ""
        extra = "tpu" if package == "libtpu" else ""
        raise UnsupportedError(
            f"{package} is not installed",
            next_step=f"pip install 'aot-lora[{extra}]'" if extra else f"pip install {package}",
        ) from None


@cache
def cpu_features() -> str:
    """The instruction set extensions of this host's CPU, sorted; its architecture elsewhere."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("flags", "Features"):
                return " ".join(sorted(set(value.split())))
    import platform

    return f"{platform.machine()} {platform.processor()}".strip()


@cache
def gpu_name() -> str:
    """The first NVIDIA GPU's name as its driver gives it, or nothing where there is none."""
    for info in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Model:"):
                return line.partition(":")[2].strip()
    return ""
