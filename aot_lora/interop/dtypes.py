"""From torch's dtypes and values to numpy's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from aot_lora.errors import ProgramError

_NARROW = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}


def dtype_name(tensor: Any, *, where: str) -> str:
    """The numpy name of a tensor's dtype, for instance ``bfloat16``.

    Raises:
      ProgramError: it has 64 bits, as torch's integers have unless told otherwise.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    narrow = _NARROW.get(name)
    if narrow is not None:
        raise ProgramError(
            f"a tensor of {name}",
            where=where,
            expected=f"{narrow}: JAX narrows 64 bits silently, and a TPU emulates them",
            found=f"{name}{list(tensor.shape)}",
            next_step=f"convert it once, with .to(torch.{narrow})",
        )
    return name


def numpy_of(tensor: Any, *, where: str) -> np.ndarray:
    """A tensor's values, of any dtype that JAX has; no copy of what is on the CPU already.

    Raises:
      ProgramError: it has 64 bits.
    """
    import torch  # pyright: ignore[reportMissingImports]  # an extra

    name = dtype_name(tensor, where=where)
    values = tensor.detach().cpu().contiguous()
    if not hasattr(ml_dtypes, name):
        return values.numpy()
    dtype = np.dtype(getattr(ml_dtypes, name))  # numpy reads none of these from torch
    return values.view({1: torch.uint8, 2: torch.int16}[dtype.itemsize]).numpy().view(dtype)
