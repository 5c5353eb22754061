"""Opens a target: the device to lower for, and the device to run on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils

from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import HOST_DEVICES


def compile_devices(target: TargetSpec) -> tuple[Any, ...]:
    """The devices to compile for, in the order of the mesh.

    For a TPU they are chips of a topology of the real TPU compiler, for a GPU with a target config
    those of one of XLA's; neither device is needed.

    Raises:
      UnsupportedError: this host or what is installed on it has no such devices.
    """
    if target.target_config:
        from aot_lora.targets.cuda import topology_devices

        return topology_devices(target)
    if target.platform == "tpu":
        return in_order(_topology_devices(target.topology)[: target.devices])
    return host_devices(target)


def host_devices(target: TargetSpec, first: Any = None) -> tuple[Any, ...]:
    """The devices of this host that run executables of this target, in the order of the mesh.

    Args:
      target: what is to run.
      first: the first of them, for a replica; the host's first unless given.

    Raises:
      UnsupportedError: this host has too few.
    """
    try:
        present = jax.local_devices(backend=target.platform)
    except RuntimeError as error:
        raise UnsupportedError(
            f"no {target.platform} device on this host",
            expected=str(target),
            found=_first_line(error),
            next_step=f"run this on a host with such a device, with jax[{target.platform}]",
        ) from None
    if first is not None and first not in present:
        raise UnsupportedError(
            f"{first} is not one of this host's {target.platform} devices",
            expected=", ".join(map(str, present)),
        )
    start = present.index(first) if first is not None else 0
    found = present[start : start + target.devices]
    if len(found) < target.devices:
        count = f"{HOST_DEVICES}={target.devices}"
        raise UnsupportedError(
            "the mesh has more devices than this host",
            expected=f"{target.devices} {target.platform} devices",
            found=f"{len(found)}" + (f" from {first} on" if first is not None else ""),
            next_step=f"set XLA_FLAGS={count} before JAX starts"
            if target.platform == "cpu"
            else "run this on a host with as many devices",
        )
    return in_order(found)


def in_order(devices: Sequence[Any]) -> tuple[Any, ...]:
    """Devices as a one-dimensional mesh wants them: neighbours beside each other."""
    if len(devices) == 1 or devices[0].platform != "tpu":
        return tuple(devices)
    return tuple(mesh_utils.create_device_mesh((len(devices),), devices=devices))


def _topology_devices(topology: str) -> list[Any]:
    from jax.experimental import topologies

    chips = topology.partition(":")[2]
    bounds = tuple(int(size) for size in chips.split("x"))
    single = {"chips_per_host_bounds": (1, 1, 1)} if set(bounds) == {1} else {}
    try:
        found = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **single
        ).devices
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            "the installed libtpu refuses this topology",
            where=f"target.topology: {topology}",
            found=_first_line(error),
            next_step="name another topology, or install the jax and libtpu that know it",
        ) from None
    return list(found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
