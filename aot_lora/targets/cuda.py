"""GPUs that are compiled for without one, by a target config; and whether a GPU is such a one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from aot_lora._jax_compat.topology import target_config_of
from aot_lora.config.gpus import Gpu, gpu_of
from aot_lora.errors import UnsupportedError
from aot_lora.plan import TargetSpec

_BUILD_EXTRA = "pip install 'aot-lora[cuda-build]'"


def topology_devices(target: TargetSpec) -> tuple[Any, ...]:
    """The GPUs of a target's topology: one host with as many as the mesh has.

    Raises:
      UnsupportedError: the CUDA plugin is missing, or refuses the target config.
    """
    try:
        found = topologies.get_topology_desc(
            platform="cuda",
            target_config=target.target_config,
            topology=f"1x1x{target.devices}",  # slices, hosts of each, GPUs of each
        ).devices
    except NotImplementedError:
        raise UnsupportedError(
            "compiling for a GPU without one needs JAX's CUDA plugin",
            where=f"target.topology: {target.topology}",
            found="no jax-cuda13-plugin that this jax can load",
            next_step=_BUILD_EXTRA,
        ) from None
    except (RuntimeError, ValueError) as error:
        raise UnsupportedError(
            "the installed CUDA plugin refuses this target config",
            where=f"target.topology: {target.topology}",
            expected="one written by this jax, or for it: jax 0.11 or newer for a shipped one",
            found=f"jax {jax.__version__}: {(str(error).splitlines() or [''])[0][:200]}",
            next_step="install a newer jax, or write one with `aot-lora doctor --target-config`",
        ) from None
    return tuple(found)


def without_gpu(target: TargetSpec) -> AbstractContextManager[Any]:
    """Tells Pallas which GPU to trace for, where it would ask JAX's default device."""
    if not target.target_config or target.devices > 1:  # a mesh of its own says it
        return nullcontext()
    gpu = gpu_of(target.target_config)
    device = AbstractDevice(device_kind=gpu.name, num_cores=gpu.cores, platform="gpu")
    return use_abstract_mesh(AbstractMesh((), (), (), abstract_device=device))


def check_gpus(target: TargetSpec, devices: Sequence[Any]) -> None:
    """Compares GPUs of this host with the one that a target's executables were compiled for.

    XLA compares nothing: it loads an executable of a GPU with more cores or memory, and fails or
    is slow when that is run.

    Raises:
      UnsupportedError: another GPU; names all that differs.
    """
    if not target.target_config:
        return
    wanted, found = gpu_of(target.target_config), gpu_of(target_config_of(devices[:1]))
    if differs := _differences(wanted, found):
        raise UnsupportedError(
            "this host's GPU is not the one of the target config",
            where=f"target.topology: {target.topology}",
            expected=", ".join(text for text, _ in differs),
            found=", ".join(text for _, text in differs),
            next_step="name this GPU's topology and warm up for it; "
            "`aot-lora doctor --target-config` writes its target config",
        )


def _differences(wanted: Gpu, found: Gpu) -> list[tuple[str, str]]:
    """What is expected and what was found, in words, where they differ."""
    gib = 2**30
    words = [
        (wanted.name, found.name),
        (
            f"compute capability {wanted.compute_capability}",
            f"compute capability {found.compute_capability}",
        ),
        (f"{wanted.cores} cores", f"{found.cores} cores"),
    ]
    differs = [(one, other) for one, other in words if one != other]
    # Drivers keep a little more or less of the same device for themselves.
    if abs(found.memory_bytes - wanted.memory_bytes) > wanted.memory_bytes // 50:
        memory = (f"{gpu.memory_bytes / gib:.1f} GiB" for gpu in (wanted, found))
        differs.append((next(memory), next(memory)))
    return differs
