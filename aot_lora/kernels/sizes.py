"""Static sizes that kernels are asked about and chosen by."""

from __future__ import annotations

from dataclasses import dataclass

STACKED = "each layer's weight would be copied out of the stack of all layers"
"""Why a kernel that multiplies by itself does not serve `Sizes.stacked`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Static sizes of projections that read the same rows, on one device.

    Args:
      tokens: rows T.
      lanes: lanes L of the batch.
      d: inputs D.
      o: outputs O of each projection.
      quantum: lanes of a block.
      most: blocks of the largest adapter there may be.
      dtype: of weights, banks and rows.
      stacked: whether the weights lie in a stack of all layers, as a scan has them. XLA's matmuls
        read a layer in place; a kernel is handed a copy of it.
    """

    tokens: int
    lanes: int
    d: int
    o: tuple[int, ...]
    quantum: int
    most: int
    dtype: str
    stacked: bool = False
