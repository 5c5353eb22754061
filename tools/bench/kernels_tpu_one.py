"""One kernel alone, for tuning; imported by the child that costs it, by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax.numpy as jnp
from kernels_tpu_forms import BANK_LANES, LAYERS, Made

from aot_lora.kernels.blocks import NOBODY
from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_fused import pallas_tpu as fuse
from aot_lora.kernels.lora_segments import pallas_tpu as segment
from aot_lora.kernels.lora_segments.segments import Segments
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink


def kernel(
    array: Any, *, op: str, tokens: int, lanes: int, quantum: int, d: int, o: int, tuning: Any
) -> Made:
    """A kernel with `tuning` as its block sizes; for lora_segments with ``block_t`` and ``tiles``,
    which each block of tokens then walks."""
    count = lanes // quantum
    held = max(lanes, BANK_LANES) // quantum + 1
    a_bank, b_bank = (array(LAYERS, held, quantum, width) for width in (d, o))
    integers = partial(array, dtype=jnp.int32)
    layer, blocks, slots = integers(), integers(count), integers(tokens)
    x, base, h = array(tokens, d), array(tokens, o), array(tokens, lanes)
    if op == "lora_shrink":
        run = partial(shrink.lora_shrink, **tuning)
        return run, (x, a_bank, layer, blocks, integers(count), slots), ()
    if op == "lora_expand":
        run = partial(expand.lora_expand, **tuning)
        return run, (base, h, b_bank, layer, blocks, slots), (0,)
    if op == "lora_fused":
        run = partial(fuse.lora_fused, **tuning)
        return run, (x, array(d, o), h, b_bank, layer, blocks, slots), ()
    block_t, rest = tuning["block_t"], {k: v for k, v in tuning.items() if k != "block_t"}

    def segments(base: Any, x: Any, a: Any, b: Any, layer: Any, blocks: Any, owners: Any) -> Any:
        batch = Segments(blocks, jnp.full_like(blocks, NOBODY), blocks[:, 0])
        slots = owners[:, :1].reshape(-1, 1)
        slots = jnp.broadcast_to(slots, (tokens // block_t, block_t)).reshape(-1, 1)
        return segment.static_twin(base, x, a, b, layer, batch, owners, slots, **rest)

    listed = integers(tokens // block_t, count)
    return (
        segments,
        (base, x, a_bank, b_bank, layer, listed, integers(tokens // block_t, lanes)),
        (0,),
    )
