"""GPUs as topologies, for compiling without one."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax._src.lib import xla_client


def target_config_of(devices: Sequence[Any]) -> str:
    """What XLA has to know of these GPUs to compile without them, as a text proto."""
    return str(xla_client.get_topology_for_devices(list(devices)).target_config)
