"""How much memory of a device an executable may use. No jax here."""

from __future__ import annotations

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
    if target.platform != "tpu":
        return 0
    return int(TPU_HBM_GIB[target.topology.partition(":")[0]] * 2**30)
