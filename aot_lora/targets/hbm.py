"""How much memory of a device an executable may use. No jax here."""

from __future__ import annotations

import os

from aot_lora.config.gpus import gpu_of
from aot_lora.plan import TargetSpec

# GiB of HBM that the TPU compiler lets a program have on one device of its topology; what it and
# the runtime keep for themselves is off already. Source: its own message for a program that needs
# 300 GiB, "exceeds available HBM (31.24G)", libtpu 0.0.50.1; libtpu 0.0.42.1 says up to 0.01 more.
# On v4, v5p and tpu7x a device of the topology is one core, so v4 has half of a chip's 32 GiB.
TPU_HBM_GIB = {
    "v4": 15.25,
    "v5e": 15.75,
    "v5p": 95.73,
    "v6e": 31.24,
    "tpu7x": 94.74,
}


def hbm_bytes(target: TargetSpec) -> int:
    """Memory of one device that programs may use, in bytes; 0 where only the device can tell."""
    if target.target_config:
        # JAX takes this much of a GPU; the rest is the driver's, and of libraries such as NCCL.
        share = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.75"))
        return int(gpu_of(target.target_config).memory_bytes * share)
    if target.platform != "tpu":
        return 0
    return int(TPU_HBM_GIB[target.topology.partition(":")[0]] * 2**30)
