"""lora_project in float32 numpy, row by row: the oracle of every form."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lora_project(
    x: np.ndarray,
    weights: Sequence[np.ndarray],
    banks: Sequence[tuple[np.ndarray, np.ndarray]],
    layer: int,
    blocks: np.ndarray,
    owners: np.ndarray,
    slots: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """As `Form.project`, in float32: [T, O] of each projection."""
    found: list[np.ndarray] = []
    wide = x.astype(np.float32)
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        y = wide @ weight.astype(np.float32)
        for row, slot in enumerate(slots):
            own = blocks[owners == slot] if slot >= 0 else blocks[:0]
            a, b = (
                bank[layer, own].reshape(-1, bank.shape[-1]).astype(np.float32)
                for bank in (a_bank, b_bank)
            )
            y[row] += (a @ wide[row]) @ b
        found.append(y)
    return tuple(found)
