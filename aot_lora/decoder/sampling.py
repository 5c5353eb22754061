"""From logits to tokens, on the device."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def sample(
    logits: jax.Array,
    temperature: jax.Array,
    seeds: jax.Array,
    positions: jax.Array,
    *,
    axis: str | None,
) -> jax.Array:
    """One token for each row: the most likely one, or one drawn by Gumbel noise.

    argmax(logits / temperature + noise) is a draw from softmax(logits / temperature); the noise
    comes from a row's seed and position alone, so that a draw can be repeated.

    Args:
      logits: [rows, V] float32, or a shard [rows, V / tp] of it.
      temperature: [rows] float32; 0 takes the most likely token.
      seeds: [rows] uint32.
      positions: [rows] int32.
      axis: the mesh axis over which the vocabulary is split.

    Returns:
      [rows] int32.
    """
    width = logits.shape[1]
    shards = lax.axis_size(axis) if axis else 1
    start = lax.axis_index(axis) * width if axis else 0

    def noise(seed: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
        whole = jax.random.gumbel(key, (shards * width,), jnp.float32)
        return lax.dynamic_slice_in_dim(whole, start, width)

    drawn = temperature[:, None] > 0
    warmth = jnp.where(drawn, temperature[:, None], 1.0)
    noisy = logits / warmth + jax.vmap(noise)(seeds, positions)
    scores = jnp.where(drawn, noisy, logits)
    best, token = scores.max(axis=1), scores.argmax(axis=1).astype(jnp.int32) + start
    if axis:
        # The lowest token of the best ones, as argmax has it; two sums of [rows], no logits move.
        token = lax.pmin(jnp.where(best == lax.pmax(best, axis), token, shards * width), axis)
    return token
