"""What reading an adapter yields: frozen values, no weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

# The dtypes that weights may have, in a file and in a plan.
DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor in the file.

    Args:
      key: its name there.
      dtype: ``float32``, ``float16`` or ``bfloat16``.
      shape: two sizes, both at least 1.
      offset: of its first byte, from the start of the file.
      nbytes: its size.
    """

    key: str
    dtype: str
    shape: tuple[int, int]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """The A and the B of one module in one layer: adds ``scale * x @ A.T @ B.T`` to its output.

    Args:
      path: the module's name in the base model, for instance ``model.layers.3.self_attn.q_proj``.
      module: the last component of it, ``q_proj``.
      layer: the number of its layer; None outside the layers, as for ``lm_head``.
      rank: R, at least 1.
      scale: alpha / R, or alpha / sqrt(R) with rslora; a finite float32, never 0.
      a: [R, D].
      b: [O, R].
    """

    path: str
    module: str
    layer: int | None
    rank: int
    scale: float
    a: Tensor
    b: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter whose files are whole and agree with each other.

    Args:
      folder: where it is.
      file: the weights.
      base_model: what the config names as its base, if it does.
      pairs: at least one, ordered by layer and path.
      idle: what the config targets without any tensors in the file.
      copies: modules whose base weight the file holds, too. Nobody reads it: it is the base's.
      stamp: (bytes, mtime in ns, inode) of the config and of the weights, for caches.
    """

    folder: Path
    file: Path
    base_model: str | None
    pairs: tuple[Pair, ...]
    idle: tuple[str, ...]
    copies: tuple[str, ...]
    stamp: Stamp

    @property
    def rank(self) -> int:
        """The largest rank of its pairs."""
        return max(pair.rank for pair in self.pairs)

    @property
    def nbytes(self) -> int:
        """Bytes of its weights as the file holds them."""
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs)


def scale_of(*, alpha: float, rank: int, rslora: bool) -> float:
    """The factor of B @ A, as PEFT computes it. For rslora: Kalajdzievski, arXiv:2312.03732."""
    return alpha / (math.sqrt(rank) if rslora else rank)
