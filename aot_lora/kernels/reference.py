"""Multi-LoRA by its definition: each adapter unpadded, in float32, one row at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def lora(
    x: np.ndarray,
    base: np.ndarray,
    adapters: Mapping[int, tuple[np.ndarray, np.ndarray]],
    slots: np.ndarray,
) -> np.ndarray:
    """base + x A^T B for each row, with the row's own adapter (Hu et al., arXiv 2106.09685).

    Args:
      x: [T, D].
      base: [T, O].
      adapters: slot -> (A [r, D], B [r, O], transposed and scaled), any ranks.
      slots: [T] int; -1 is exactly the base.

    Returns:
      [T, O] float32.
    """
    y = base.astype(np.float32)
    for row, slot in enumerate(slots):
        if slot >= 0:
            a, b = adapters[int(slot)]
            y[row] += (x[row].astype(np.float32) @ a.astype(np.float32).T) @ b.astype(np.float32)
    return y


def tolerance(dtype: str, *, reduction: int) -> float:
    """Relative error, against the norm of the result, that rounding alone may cause.

    Args:
      dtype: of the stored values; sums are float32.
      reduction: length of the longest sum, D or L.
    """
    unit = {"float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    return 4 * unit + 4 * 2.0**-24 * reduction**0.5
