"""The environment that compiling for a target needs. No jax here: it must stand before."""

from __future__ import annotations

import os

from aot_lora.plan import TargetSpec

HOST_DEVICES = "--xla_force_host_platform_device_count"


def worker_environment(target: TargetSpec) -> dict[str, str]:
    """Environment variables for a process that compiles; set before it imports jax."""
    if target.platform == "tpu":
        return {
            "JAX_PLATFORMS": "cpu",
            "TPU_ACCELERATOR_TYPE": target.topology.partition(":")[0] + "-1",
            "TPU_SKIP_MDS_QUERY": "1",
            "TPU_WORKER_HOSTNAMES": "localhost",
            "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
            "TPU_STDERR_LOG_LEVEL": "3",
            "TPU_MIN_LOG_LEVEL": "3",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        }
    if target.platform == "cuda":
        return {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {"JAX_PLATFORMS": "cpu", **_host_devices(target.devices)}


def _host_devices(count: int) -> dict[str, str]:
    """A CPU is one device unless XLA is told otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    if count == 1 or HOST_DEVICES in flags:
        return {}
    return {"XLA_FLAGS": f"{flags} {HOST_DEVICES}={count}".strip()}
