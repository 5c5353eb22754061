"""The planner: axes, buckets, variants, cost. Pure: no jax, no yaml, no I/O.

Letters: T tokens, D inputs, O outputs, R rank, S slots, L lanes.
"""

from aot_lora.plan.axes import Axis, gaps, mean_waste, pow2_buckets, step_buckets
from aot_lora.plan.cost import Estimate, estimate, usable_cores
from aot_lora.plan.decoder import (
    COLUMN_MODULES,
    HEAD_MODULE,
    ROW_MODULES,
    DecoderShape,
    KvCache,
    RopeScaling,
)
from aot_lora.plan.plan import (
    DTYPE_BYTES,
    LORA_PROGRAMS,
    Plan,
    WideAxis,
    build_plan,
    round_up,
    widen,
)
from aot_lora.plan.variants import Module, Point, TargetSpec, UserEntry, Variant

__all__ = [
    "COLUMN_MODULES",
    "DTYPE_BYTES",
    "HEAD_MODULE",
    "LORA_PROGRAMS",
    "ROW_MODULES",
    "Axis",
    "DecoderShape",
    "Estimate",
    "KvCache",
    "Module",
    "Plan",
    "Point",
    "RopeScaling",
    "TargetSpec",
    "UserEntry",
    "Variant",
    "WideAxis",
    "build_plan",
    "estimate",
    "gaps",
    "mean_waste",
    "pow2_buckets",
    "round_up",
    "step_buckets",
    "usable_cores",
    "widen",
]
