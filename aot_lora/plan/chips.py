"""Peaks of accelerators, for a roofline. Per chip, dense bfloat16."""

from __future__ import annotations

from aot_lora.errors import PlanError
from aot_lora.plan.fit import Cost, Roofline
from aot_lora.plan.mix import LaneCost
from aot_lora.plan.plan import DTYPE_BYTES, Plan
from aot_lora.plan.variants import TargetSpec

# FLOP/s and bytes/s. TPU: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, the page of
# each version. H200: NVIDIA's data sheet, 1,979 TFLOP/s with sparsity, so half of it, and 4.8 TB/s.
PEAKS = {
    "h200": (989.5e12, 4.8e12),
    "v4": (275e12, 1228e9),
    "v5e": (197e12, 819e9),
    "v5p": (459e12, 2765e9),
    "v6e": (918e12, 1640e9),
}


def work(plan: Plan) -> LaneCost:
    """The multiply-adds of a step over the modules of a plan: those of the base and of the lanes.

    A token of L lanes takes D x O for the base of a module and (D + O) x L for its adapters.
    """
    base = sum(module.d * module.o * module.layers for module in plan.modules)
    lane = sum((module.d + module.o) * module.layers for module in plan.modules)

    def of_lanes(lanes: int) -> Cost:
        return lambda buckets: buckets * (base + lane * lanes)

    return of_lanes


def roofline(plan: Plan, target: TargetSpec, *, lanes: int = 0) -> Roofline:
    """The roofline of a step over the modules of a plan, on one device of its mesh.

    Every weight is read once, and the inputs and outputs of each module are moved once a token.
    Attention and launches are left out.

    Args:
      plan: the plan; target: one of its targets.
      lanes: of adapters, whose weights are read and multiplied like the base's.

    Raises:
      PlanError: no peaks are known for the target.
    """
    chip = target.topology.partition(":")[0]
    if chip not in PEAKS:
        raise PlanError(
            f"no roofline is known for {target}",
            expected="a target of one of " + ", ".join(PEAKS),
            next_step="fit to padded tokens instead",
        )
    flops, bandwidth = PEAKS[chip]
    widths = sum((module.d + module.o) * module.layers for module in plan.modules) / plan.tp
    weights = sum(module.d * module.o * module.layers for module in plan.modules) / plan.tp
    weights += lanes * widths
    return Roofline(
        flops_per_token=2 * weights,
        bytes_per_step=weights * DTYPE_BYTES[plan.dtype],
        bytes_per_token=widths * DTYPE_BYTES[plan.dtype],
        flops_per_second=flops,
        bytes_per_second=bandwidth,
    )
