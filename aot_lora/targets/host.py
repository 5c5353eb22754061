"""The devices of this process as a target, for what is compiled where it runs."""

from __future__ import annotations

import jax

from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec
from aot_lora.targets.identity import TPU_KINDS, identity


def this_host() -> tuple[TargetSpec, dict[str, str]]:
    """What JAX's default backend is, and its identity by named part, all of its devices counted.

    Raises:
      UnsupportedError: several hosts, or devices that aot-lora does not know.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise UnsupportedError(
            "calls of a program that spans several hosts cannot be recorded",
            found=f"{jax.process_count()} processes",
            next_step="use plain jax.jit on several hosts",
        )
    platform = "cuda" if jax.default_backend() == "gpu" else jax.default_backend()
    topology = ""
    if platform == "tpu":
        names = {kind: name for name, kind in TPU_KINDS.items()}
        topology = f"{names.get(devices[0].device_kind, '?')}:{len(devices)}"
    if platform not in ("cpu", "cuda", "tpu") or topology.startswith("?"):
        raise UnsupportedError(
            "the devices of this host are not known", found=str(devices[0].device_kind)
        )
    target = TargetSpec(platform=platform, topology=topology)
    parts = identity(target)
    parts["device kind"] = str(devices[0].device_kind)
    parts["device count"] = str(len(devices))
    return target, parts
