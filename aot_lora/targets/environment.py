"""The environment that compiling for a target needs. No jax here: it must stand before."""

from __future__ import annotations

import os
from pathlib import Path

from aot_lora.plan import TargetSpec

HOST_DEVICES = "--xla_force_host_platform_device_count"


def worker_environment(target: TargetSpec, *, autotune: Path | None = None) -> dict[str, str]:
    """Environment variables for a process that compiles; set before it imports jax.

    Args:
      target: what it compiles for.
      autotune: where the results of autotuning are, if the target has some.
    """
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
    if target.target_config:
        # Both would print that there is no GPU, and where XLA looked for one.
        quiet = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
        if not target.autotune:
            return quiet
        assert autotune is not None
        return quiet | _more_flags(f"--xla_gpu_load_autotune_results_from='{autotune.absolute()}'")
    if target.platform == "cuda":
        return {"JAX_PLATFORMS": "cuda,cpu", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return {"JAX_PLATFORMS": "cpu", **_host_devices(target.devices)}


def _host_devices(count: int) -> dict[str, str]:
    """A CPU is one device unless XLA is told otherwise."""
    flags = os.environ.get("XLA_FLAGS", "")
    if count == 1 or HOST_DEVICES in flags:
        return {}
    return _more_flags(f"{HOST_DEVICES}={count}")


def recording_environment(target: TargetSpec, results: Path) -> dict[str, str]:
    """As `worker_environment`, for a process that autotunes on its GPU and writes what it found."""
    flag = f"--xla_gpu_dump_autotune_results_to='{results.absolute()}'"
    return worker_environment(target) | _more_flags(flag)


def _more_flags(flag: str) -> dict[str, str]:
    return {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()}
