"""lora_segments in float32 numpy: the segments change what is read, never the result."""

from __future__ import annotations

import numpy as np

from aot_lora.kernels.lora_expand import reference as expand
from aot_lora.kernels.lora_shrink import reference as shrink


def lora_segments(
    base: np.ndarray,
    x: np.ndarray,
    a_bank: np.ndarray,
    b_bank: np.ndarray,
    layer: int,
    blocks: np.ndarray,
    owners: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """As `xla.lora_segments`, from the batch's own `blocks` and `owners`: [T, O] float32."""
    h = shrink.lora_shrink(x, a_bank, layer, blocks, owners, slots)
    return expand.lora_expand(base, h, b_bank, layer, blocks, slots)
