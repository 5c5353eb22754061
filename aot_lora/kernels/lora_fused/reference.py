"""lora_fused in float32 numpy: the oracle of every backend."""

from __future__ import annotations

import numpy as np

from aot_lora.kernels.lora_expand.reference import lora_expand


def lora_fused(
    x: np.ndarray,
    w: np.ndarray,
    h: np.ndarray,
    b_bank: np.ndarray,
    layer: int,
    blocks: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """As `xla.lora_fused`, in float32: [T, O]."""
    base = x.astype(np.float32) @ w.astype(np.float32)
    return lora_expand(base, h, b_bank, layer, blocks, slots)
