"""Steps of the engine: what is warmed up."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from aot_lora import Program

from . import layers
from .kernels import add_rows, rowwise, scale_rows


def decode_step(cache, x, weight, up, down, lengths, bias, *, scale):
    """One step of decoding."""
    normed = layers.norm(x, weight)
    rows = layers.mlp(normed, up, down)
    rows = rows + layers._positions(lengths.astype(x.dtype))[:, None] * scale + bias
    return cache + rows, rows


def decode(point, context):
    x = context.array(point.tokens, 128)
    args = (
        x,
        x,
        context.array(128),
        context.array(128, 256),
        context.array(256, 128),
        context.array(point.tokens, dtype="int32"),
        context.array(128),
    )
    return Program(fn=decode_step, args=args, donate=(0,), static={"scale": 2})


def mix(point, context):
    x = context.array(point.tokens, 128)

    def fn(x, y):
        scaled = rowwise(scale_rows, x, platform=context.target.platform)
        return rowwise(add_rows, scaled, y, platform=context.target.platform) - 1

    return Program(fn=fn, args=(x, x))


def spread(point, context):
    rows = PartitionSpec("tp")
    args = (context.array(point.tokens, 128, spec=rows), context.array(128, 128))
    return Program(fn=lambda x, w: jax.nn.relu(x @ w) + jnp.float32(1), args=args)
