"""Opens a target: the device to lower for, and the device to run on."""

from __future__ import annotations

from typing import Any

import jax

from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec


def compile_device(target: TargetSpec) -> Any | None:
    """The device to name while lowering, or None where JAX's default device is the one.

    For a TPU it is one chip of a topology of the real TPU compiler; no TPU is needed.

    Raises:
      UnsupportedError: this host or what is installed on it has no such device.
    """
    if target.platform == "tpu":
        return _topology_device(target.topology)
    host_device(target)
    return None


def host_device(target: TargetSpec) -> Any:
    """The device of this host that runs executables of this target.

    Raises:
      UnsupportedError: this host has none.
    """
    try:
        device = jax.local_devices(backend=target.platform)[0]
    except RuntimeError as error:
        raise UnsupportedError(
            f"no {target.platform} device on this host",
            expected=str(target),
            found=_first_line(error),
            next_step=f"run this on a host with such a device, with jax[{target.platform}]",
        ) from None
    return device


def _topology_device(topology: str) -> Any:
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
    return found[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:200]
