"""Kernels as plain functions, to compile alone or to call inside a step.

Letters: T tokens, D inputs, O outputs, L lanes; see each function for shapes and dtypes.
"""

from aot_lora.kernels.blocks import bank_reset, bank_write
from aot_lora.kernels.lora_expand.xla import lora_expand, lora_expand_single
from aot_lora.kernels.lora_shrink.xla import lora_shrink, lora_shrink_single

__all__ = [
    "bank_reset",
    "bank_write",
    "lora_expand",
    "lora_expand_single",
    "lora_shrink",
    "lora_shrink_single",
]
