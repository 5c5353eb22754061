"""lora_expand in float32 numpy, row by row: the oracle of every backend."""

from __future__ import annotations

import numpy as np


def lora_expand(
    base: np.ndarray,
    h: np.ndarray,
    b_bank: np.ndarray,
    layer: int,
    blocks: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """As `xla.lora_expand`, in float32: [T, O]."""
    b = b_bank[layer, blocks].reshape(h.shape[1], -1).astype(np.float32)
    y = base.astype(np.float32)
    for row, slot in enumerate(slots):
        if slot >= 0:
            y[row] += h[row].astype(np.float32) @ b
    return y


def lora_expand_single(
    base: np.ndarray, h: np.ndarray, b_bank: np.ndarray, layer: int, blocks: np.ndarray
) -> np.ndarray:
    """As `xla.lora_expand_single`, in float32: [T, O]."""
    return lora_expand(base, h, b_bank, layer, blocks, np.zeros(base.shape[0], np.int32))
