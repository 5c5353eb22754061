"""A user's program with a Pallas kernel for GPUs, for excerpt.yaml."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from aot_lora import Context, Point, Program


def triton_step(point: Point, context: Context) -> Program:
    """[T, 128] @ [128, 128] in blocks of 16 rows, by Pallas through Triton."""
    x = context.array(point.tokens, 128)
    return Program(fn=_times, args=(x, context.array(128, 128)))


def _times(x: Any, w: Any) -> Any:
    def kernel(x_ref: Any, w_ref: Any, y_ref: Any) -> None:
        y = jax.numpy.dot(x_ref[...], w_ref[...], preferred_element_type=jax.numpy.float32)
        y_ref[...] = y.astype(y_ref.dtype)

    rows = pl.BlockSpec((16, 128), lambda i: (i, 0))
    whole = pl.BlockSpec((128, 128), lambda i: (0, 0))
    return pl.pallas_call(
        kernel,
        grid=(x.shape[0] // 16,),
        in_specs=[rows, whole],
        out_specs=rows,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=triton.CompilerParams(),
    )(x, w)
