"""lora_shrink in float32 numpy, row by row and block by block: the oracle of every backend."""

from __future__ import annotations

import numpy as np


def lora_shrink(
    x: np.ndarray,
    a_bank: np.ndarray,
    layer: int,
    blocks: np.ndarray,
    owners: np.ndarray,
    slots: np.ndarray,
) -> np.ndarray:
    """As `xla.lora_shrink`, in float32: [T, L]."""
    quantum = a_bank.shape[2]
    h = np.zeros((x.shape[0], blocks.shape[0] * quantum), np.float32)
    for row, slot in enumerate(slots):
        for index, (block, owner) in enumerate(zip(blocks, owners, strict=True)):
            if owner == slot:
                lanes = slice(index * quantum, (index + 1) * quantum)
                h[row, lanes] = a_bank[layer, block].astype(np.float32) @ x[row].astype(np.float32)
    return h


def lora_shrink_single(
    x: np.ndarray, a_bank: np.ndarray, layer: int, blocks: np.ndarray
) -> np.ndarray:
    """As `xla.lora_shrink_single`, in float32: [T, L]."""
    slots = np.zeros(x.shape[0], np.int32)
    return lora_shrink(x, a_bank, layer, blocks, np.zeros_like(blocks), slots)
