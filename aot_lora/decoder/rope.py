"""Rotary positions, Llama's way: the first half of a head turns with the second."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from aot_lora.plan import DecoderShape


def frequencies(shape: DecoderShape) -> np.ndarray:
    """Radians per position of each pair: [head_dim / 2] float32.

    Llama 3.1 slows those of long wavelength (`_compute_llama3_parameters` of transformers).
    """
    exponents = np.arange(0, shape.head_dim, 2, dtype=np.float64) / shape.head_dim
    plain = shape.rope_theta**-exponents
    scaling = shape.rope_scaling
    if scaling is None:
        return plain.astype(np.float32)
    turns = scaling.original_length * plain / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    share = np.clip((turns - low) / (high - low), 0, 1)  # 0: slowed by the factor, 1: as it is
    return ((1 - share) * plain / scaling.factor + share * plain).astype(np.float32)


def angles(shape: DecoderShape, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(cosines, sines) of positions [T] int32, each [T, 1, head_dim / 2] float32."""
    turned = positions.astype(jnp.float32)[:, None, None] * frequencies(shape)
    return jnp.cos(turned), jnp.sin(turned)


def rotate(x: jax.Array, turn: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Turns heads [T, heads, head_dim] by `angles`; float32 inside."""
    cosines, sines = turn
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    halves = (first * cosines - second * sines, second * cosines + first * sines)
    return jnp.concatenate(halves, axis=-1).astype(x.dtype)
