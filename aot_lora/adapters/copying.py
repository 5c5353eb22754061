"""Moves one tensor at a time from its source to its places, and checks its values on the way."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from aot_lora.adapters.naming import shown
from aot_lora.adapters.sources import Source
from aot_lora.adapters.values import DTYPES, Tensor
from aot_lora.errors import AdapterError

_INFINITY = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}  # bits
_SIGNED = {2: np.dtype(np.int16), 4: np.dtype(np.int32)}
_UNSIGNED = {2: np.dtype(np.uint16), 4: np.dtype(np.uint32)}


class Target(NamedTuple):
    """A place for some rows of a tensor.

    Args:
      view: where they go, in the plan's dtype; its rows say how many.
      first_row: the first of them.
      factor: multiply by it before the one rounding, if given.
      scale: of the pair, in B's; what the product must not overflow by.
    """

    view: np.ndarray
    first_row: int = 0
    factor: float | None = None
    scale: float = 1.0


class Job(NamedTuple):
    """A tensor and all of its places."""

    tensor: Tensor
    targets: tuple[Target, ...]


class Worker:
    """Does jobs one after the other, with a scratch buffer of its own.

    Args:
      source: where tensors come from; shared by workers.
      dtype: the plan's.
    """

    def __init__(self, source: Source, dtype: np.dtype) -> None:
        self._source = source
        self._dtype = dtype
        self._limit = _value(_INFINITY[dtype.name] - 1, dtype)
        self._harmless: dict[tuple[str, float], int] = {}
        self._scratch = np.empty(0, np.uint8)

    def run(self, jobs: Iterable[Job]) -> None:
        """Does all jobs.

        Raises:
          AdapterError: a value that is not finite; DamagedAdapterError: a short file.
        """
        for job in jobs:
            self._do(job)

    def _do(self, job: Job) -> None:
        tensor, targets = job
        first = targets[0].view
        straight = (
            tensor.dtype == self._dtype.name
            and first.shape == tensor.shape
            and first.flags.c_contiguous
            and targets[0].factor is None
        )
        values = first if straight else self._buffer(tensor)
        self._source.read(tensor, values)
        self._check(tensor, values, scale=max(abs(target.scale) for target in targets))
        for view, first_row, factor, _ in targets[1:] if straight else targets:
            rows = values[first_row : first_row + view.shape[0]]
            if factor is not None:
                rows = rows.astype(np.float32) * np.float32(factor)
            with np.errstate(under="ignore", over="ignore"):
                np.copyto(view, rows, casting="unsafe")

    def _buffer(self, tensor: Tensor) -> np.ndarray:
        if self._scratch.nbytes < tensor.nbytes:
            self._scratch = np.empty(tensor.nbytes, np.uint8)
        return self._scratch[: tensor.nbytes].view(DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _check(self, tensor: Tensor, values: np.ndarray, *, scale: float) -> None:
        """Refuses NaN, infinity, and what becomes infinity in the plan's dtype or when scaled.

        Casts are monotonic, so that the largest magnitude tells for all of them. And the bits of a
        float without its sign grow with its magnitude, NaN and infinity at the end: two integer
        maxima find it, at some 90 GB/s where `isfinite` of a bfloat16 takes 2.
        """
        width = values.dtype.itemsize
        positive = values.view(_SIGNED[width]).max()
        negative = int(values.view(_UNSIGNED[width]).max()) - (1 << 8 * width - 1)
        bits = max(int(positive), negative, 0)
        harmless = self._harmless.get((tensor.dtype, scale))
        if harmless is None:
            harmless = self._harmless[tensor.dtype, scale] = self._harmless_bits(tensor, scale)
        if bits <= harmless:
            return
        if bits >= _INFINITY[tensor.dtype]:
            raise self._bad(tensor, "is not all finite", "no NaN and no infinity")
        largest = _value(bits, values.dtype)
        with np.errstate(over="ignore", under="ignore"):
            cast = float(np.array(largest, np.float32).astype(self._dtype))
        if cast > self._limit:
            raise self._bad(
                tensor, f"overflows {self._dtype.name}", f"at most {self._limit:g}", f"{largest:g}"
            )
        if cast * scale > self._limit:
            raise self._bad(
                tensor,
                f"times its scale overflows {self._dtype.name}",
                f"at most {self._limit:g}",
                f"{cast:g} x {scale:g}",
            )

    def _harmless_bits(self, tensor: Tensor, scale: float) -> int:
        """A magnitude, as bits of the file's dtype, up to which nothing can overflow."""
        dtype = DTYPES[tensor.dtype]
        own = _value(_INFINITY[tensor.dtype] - 1, dtype)
        value = min(own, self._limit, self._limit / scale) / 2  # whatever the rounding
        with np.errstate(under="ignore"):
            return int(np.array(value, np.float32).astype(dtype).view(_UNSIGNED[dtype.itemsize]))

    def _bad(
        self, tensor: Tensor, problem: str, expected: str, found: str | None = None
    ) -> AdapterError:
        return AdapterError(
            f"`{shown(tensor.key)}` {problem}",
            where=self._source.where,
            expected=expected,
            found=found,
            next_step="check how the adapter was trained or converted",
        )


def _value(bits: int, dtype: np.dtype) -> float:
    return float(np.array(bits, _UNSIGNED[dtype.itemsize]).view(dtype))
