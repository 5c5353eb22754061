"""`aot-lora doctor`: what does this host compile for, and what does it run?"""

from __future__ import annotations

import os
import platform
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from aot_lora.cli.options import FORMATS, emit, note, table
from aot_lora.config import gpus, presets
from aot_lora.errors import StoreError
from aot_lora.plan import TargetSpec

_PACKAGES = (
    "aot-lora",
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda13-pjrt",
    "jax-cuda12-plugin",
    "jax-cuda12-pjrt",
    "nvidia-cuda-nvcc",
    "nvidia-nvvm",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Devices:
    """Devices of one kind."""

    platform: str
    kind: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """A target: what keeps this host from compiling for it, and whether it has its device."""

    target: str
    obstacle: str
    runs: bool


@click.command()
@click.option(
    "--target-config", is_flag=True, help="Write the target config of this host's GPU instead."
)
@click.option("-o", "--output", metavar="FILE", help="Where to; stdout unless given.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def command(target_config: bool, output: str | None, form: str, debug: bool) -> None:
    """Show versions, devices, what this host compiles for and runs, and where its store is."""
    del debug
    if output and not target_config:
        raise click.UsageError("-o goes with --target-config")
    if target_config:
        _target_config(output, form)
    else:
        _host(form)
    sys.stdout.flush()


def _target_config(output: str | None, form: str) -> None:
    # Not the 75 % of the GPU's memory that JAX would take from those who use it now.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    from aot_lora._jax_compat.topology import target_config_of
    from aot_lora.targets.devices import host_devices

    devices = host_devices(TargetSpec("cuda"))
    text = target_config_of(devices).rstrip() + "\n"
    if output:
        try:
            Path(output).write_text(text, encoding="utf-8")
        except OSError as error:
            raise StoreError(
                f"the target config cannot be written: {error.strerror}", where=output
            ) from None
        note(f"wrote {output}; target: {{platform: cuda, topology: FILE{gpus.SUFFIX}}} takes it")
    if form == "json":
        value = {"device": devices[0].device_kind, "path": output}
        emit(value if output else {**value, "target_config": text})
    elif not output:
        sys.stdout.write(text)


def _host(form: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    versions = {"python": platform.python_version()} | _versions()
    devices = _devices()
    targets = _targets({(device.platform, device.kind) for device in devices})
    store = os.environ.get("AOT_LORA_CACHE") or str(presets.default_store_root())
    if form == "json":
        emit(
            {
                "versions": versions,
                "devices": [asdict(device) for device in devices],
                "targets": [asdict(target) for target in targets],
                "store": store,
            }
        )
        return
    table("versions", ("package", "version"), list(versions.items()))
    rows = [(device.platform, device.kind, str(device.count)) for device in devices]
    table("devices", ("platform", "kind", "count"), rows)
    rows = [(t.target, "yes" if t.runs else "no", t.obstacle or "yes") for t in targets]
    table("targets", ("target", "runs here", "compiles here"), rows)
    print(f"store, unless a config or --store names another: {store}")


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> list[_Devices]:
    import jax

    names = {"gpu": "cuda"}
    counts = Counter((str(d.platform), str(d.device_kind)) for d in jax.devices())
    return [
        _Devices(platform=names.get(name, name), kind=kind, count=count)
        for (name, kind), count in counts.items()
    ]


def _targets(present: set[tuple[str, str]]) -> list[_Target]:
    from aot_lora.targets.identity import device_kind
    from aot_lora.targets.probe import obstacle, target_of

    targets = [target_of("cpu"), *(target_of("cuda", name) for name in gpus.names())]
    targets.append(target_of("tpu", "v6e:1x1"))
    with ThreadPoolExecutor() as threads:  # each waits for a process of its own
        obstacles = threads.map(obstacle, targets)
        return [
            _Target(
                target=str(target),
                obstacle=found,
                runs=(target.platform, device_kind(target)) in present,
            )
            for target, found in zip(targets, obstacles, strict=True)
        ]
