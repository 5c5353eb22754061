"""A batch's arrays, padded on the host to its buckets: the same for every backend.

Padding on the device would compile a program for each length.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

NOBODY = -2
"""Who owns the blocks that pad a batch's: no row has it as its slot (-1 is a row without)."""

Held = Sequence[tuple[int, tuple[int, ...]]]
"""(slot, its bank blocks) of each adapter in a batch."""


def pad_rows(rows: np.ndarray, tokens: int, *, fill: int = 0) -> np.ndarray:
    """`rows` [count, ...] with `fill` below them, up to [tokens, ...]."""
    padded = np.zeros((tokens, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    if fill:
        padded[len(rows) :] = fill
    return padded


def pad_batch(
    slots: np.ndarray, held: Held, *, tokens: int, lanes: int, quantum: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What kernels see of a batch.

    Args:
      slots: [count] integers, each row's slot; -1 for none.
      held: the adapters in it.
      tokens, lanes: its buckets.
      quantum: lanes per bank block.

    Returns:
      slots [tokens] int32; blocks and owners [lanes / quantum] int32.
    """
    blocks = [block for _, theirs in held for block in theirs]
    owners = [slot for slot, theirs in held for _ in theirs]
    padding = lanes // quantum - len(blocks)
    return (
        pad_rows(np.asarray(slots, np.int32), tokens, fill=-1),
        np.array(blocks + [0] * padding, np.int32),
        np.array(owners + [NOBODY] * padding, np.int32),
    )
