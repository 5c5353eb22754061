"""One kernel alone, for tuning; imported by the child that costs it, by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from kernels_tpu_forms import BANK_LANES, LAYERS, Made

from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink


def kernel(
    array: Any, *, op: str, tokens: int, lanes: int, quantum: int, width: int, tuning: Any
) -> Made:
    """lora_shrink or lora_expand with `tuning` as its block sizes; `width` is D or O."""
    count = lanes // quantum
    bank = array(LAYERS, max(lanes, BANK_LANES) // quantum + 1, quantum, width)
    integers = partial(array, dtype=jnp.int32)
    if op == "lora_shrink":
        args = (array(tokens, width), bank, integers(), integers(count), integers(count))
        return partial(shrink.lora_shrink, **tuning), (*args, integers(tokens)), ()
    args = (array(tokens, width), array(tokens, lanes), bank, integers(), integers(count))
    return partial(expand.lora_expand, **tuning), (*args, integers(tokens)), (0,)
