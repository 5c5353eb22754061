"""Where a runtime's arrays lie: on its device, or divided over its mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import NamedSharding, PartitionSpec

from aot_lora.programs.mesh import mesh_of


class Places:
    """What `jax.device_put` takes as a place, for each division.

    Args:
      devices: of this host, in the order of the mesh.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        self.devices = tuple(devices)
        self.mesh = mesh_of(devices)

    def at(self, spec: PartitionSpec) -> Any:
        """A place for arrays divided so; the device itself where there is one."""
        return NamedSharding(self.mesh, spec) if self.mesh else self.devices[0]

    @property
    def everywhere(self) -> Any:
        """A place for arrays that are whole on each device."""
        return self.at(PartitionSpec())
