"""Arrays that a traced function closes over, and so holds as constants."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax._src.lib import _jax

from aot_lora.errors import ProgramError


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """An array that a function closes over.

    Args:
      shape, dtype: its.
      bytes: its size.
      of_jax: whether it is a `jax.Array`; else it is numpy's.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    of_jax: bool

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.shape))}] of {self.bytes:,} bytes"


def constants_of(traced: Any) -> tuple[Constant, ...]:
    """The arrays that a traced function closes over, largest first, each once.

    Args:
      traced: what `jax.jit(f).trace(...)` returned. numpy's scalars are left out.
    """
    held = {id(array): array for array in _held(traced.jaxpr)}
    found = (
        Constant(
            shape=tuple(array.shape),
            dtype=str(array.dtype),
            bytes=math.prod(array.shape) * array.dtype.itemsize,
            of_jax=isinstance(array, _jax.ArrayImpl),
        )
        for array in held.values()
    )
    return tuple(sorted(found, key=lambda one: -one.bytes))


def listed(constants: Iterable[Constant], *, most: int = 5) -> str:
    """Constants in words, with their total: ``float32[2,3] of 24 bytes; 24 bytes in all``."""
    ordered = list(constants)
    names = [str(one) for one in ordered[:most]]
    names += [f"{len(ordered) - most} more"] if len(ordered) > most else []
    return f"{', '.join(names)}; {sum(one.bytes for one in ordered):,} bytes in all"


def refuse_constant_arguments(lowered: Any, constants: tuple[Constant, ...]) -> None:
    """Refuses a lowered function whose constants JAX would hand over at each call.

    It does under `jax_use_simplified_jaxpr_constants`; otherwise they are in the executable.

    Args:
      lowered: what `traced.lower(...)` returned.
      constants: of what it was lowered from.

    Raises:
      ProgramError: it has such; names them.
    """
    if lowered._lowering.const_args:
        raise ProgramError(
            "the program closes over arrays",
            found=listed(constants),
            next_step="pass them as arguments",
        )


def refuse_held_arrays(traced: Any) -> Any:
    """Refuses a traced function that holds arrays of JAX: their values would be compiled in.

    Returns:
      `traced`.

    Raises:
      ProgramError: it does; names them.
    """
    arrays = [one for one in constants_of(traced) if one.of_jax]
    if arrays:
        raise ProgramError(
            "the function closes over arrays",
            found=listed(arrays),
            next_step="pass them as arguments: another process may hold other values",
        )
    return traced


def _held(root: Any) -> Iterator[Any]:
    pending = [root]
    while pending:
        closed = pending.pop()
        yield from (array for array in getattr(closed, "consts", ()) if _is_array(array))
        for equation in getattr(closed, "jaxpr", closed).eqns:
            literals = (getattr(operand, "val", None) for operand in equation.invars)
            yield from (value for value in literals if _is_array(value))
            pending += _jaxprs(equation.params)


def _is_array(value: Any) -> bool:
    """An array; not a scalar of numpy, nor a place that a Pallas kernel refers to."""
    return isinstance(value, _jax.ArrayImpl) or (isinstance(value, np.ndarray) and value.ndim > 0)


def _jaxprs(params: Mapping[str, Any]) -> Iterator[Any]:
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(item, "jaxpr", item), "eqns"):
                yield item
