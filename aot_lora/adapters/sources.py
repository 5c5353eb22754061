"""Where weights come from: a file's bytes, or arrays in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from aot_lora.adapters.files import read_into
from aot_lora.adapters.naming import shown
from aot_lora.adapters.values import DTYPES, Pair, Tensor
from aot_lora.errors import AdapterError
from aot_lora.plan import Plan


class Source(Protocol):
    """Hands out tensors."""

    @property
    def where(self) -> str:
        """What errors name."""
        ...

    def read(self, tensor: Tensor, out: np.ndarray) -> None:
        """Writes a tensor into `out`: contiguous, of its shape and dtype."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSource:
    """An open file."""

    fd: int
    where: str

    def read(self, tensor: Tensor, out: np.ndarray) -> None:
        """Reads a tensor with one copy, from the page cache into `out`."""
        read_into(self.fd, out.reshape(-1).view(np.uint8).data, tensor.offset, where=self.where)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArraySource:
    """Arrays by key."""

    arrays: dict[str, np.ndarray]
    where: str

    def read(self, tensor: Tensor, out: np.ndarray) -> None:
        """Copies an array, whatever its strides."""
        np.copyto(out, self.arrays[tensor.key])


def pairs_of(
    weights: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]],
    plan: Plan,
    *,
    scale: float,
    where: str,
) -> tuple[list[Pair], ArraySource]:
    """The pairs that arrays in memory make, by their shapes; the values are checked later.

    Raises:
      AdapterError: no weights, a scale that is no float32, or arrays of a wrong kind.
    """
    if not weights:
        raise AdapterError("no weights at all", where=where, expected="at least one module")
    if not 1e-38 < abs(scale) < 3.4e38:
        raise AdapterError(f"scale {scale}", where=where, expected="a finite float32, not 0")
    outside = {module.name for module in plan.modules if module.layers == 1}
    pairs: list[Pair] = []
    arrays: dict[str, np.ndarray] = {}
    for (module, layer), (a, b) in weights.items():
        path = f"{module} of layer {layer}"
        if layer < 0:
            raise AdapterError(f"no bank for `{shown(path)}`", where=where, expected="0 or more")
        half_a, half_b = _tensor(f"A of {path}", a, where), _tensor(f"B of {path}", b, where)
        rank = half_a.shape[0]
        if rank != half_b.shape[1]:
            raise AdapterError(
                f"A and B of `{shown(path)}` have different ranks",
                where=where,
                expected="A [R, D] and B [O, R]",
                found=f"A {list(a.shape)} and B {list(b.shape)}",
            )
        arrays |= {half_a.key: a, half_b.key: b}
        pairs.append(
            Pair(
                path=path,
                module=module,
                layer=None if layer == 0 and module in outside else layer,
                rank=rank,
                scale=scale,
                a=half_a,
                b=half_b,
            )
        )
    return pairs, ArraySource(arrays=arrays, where=where)


def _tensor(key: str, array: np.ndarray, where: str) -> Tensor:
    if array.ndim != 2 or 0 in array.shape or array.dtype.name not in DTYPES:
        raise AdapterError(
            f"`{shown(key)}` is no LoRA weight",
            where=where,
            expected=f"two dimensions, none of them 0, of {', '.join(DTYPES)}",
            found=f"{list(array.shape)} of {array.dtype.name}",
        )
    rows, columns = array.shape
    return Tensor(
        key=key, dtype=array.dtype.name, shape=(rows, columns), offset=0, nbytes=array.nbytes
    )
