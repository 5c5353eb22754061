"""Attention of a step's rows over one layer's cache, which holds the step's own keys already.

Letters: S sequences of the cache, K key and value heads, G query heads to each of them, H head_dim,
Q rows of a chunk. Scores and softmax are float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.blocks import Layer

CHUNK = 128
"""Rows of a prefill chunk, all of one sequence."""


def attend(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    layer: Layer,
    positions: jax.Array,
    sequences: jax.Array,
    *,
    decode_rows: int,
    together: int = 1,
) -> jax.Array:
    """Each row over the positions of its sequence up to its own.

    Args:
      q: [T, K, G, H].
      keys, values: [N, S, K, length, H], the whole cache; layer: the one meant.
      positions: [T] int32; -1 is padding, whose result means nothing.
      sequences: [T] int32.
      decode_rows: rows that are each of a sequence of their own; the rest are chunks of `CHUNK`.
      together: chunks that are computed at a time.

    Returns:
      [T, K, G, H] in the dtype of `q`.
    """
    count = q.shape[0] - decode_rows
    k, v = (lax.dynamic_index_in_dim(x, layer, keepdims=False) for x in (keys, values))
    decoded = _decode(q[:decode_rows], k, v, positions[:decode_rows], sequences[:decode_rows])
    if not count:
        return decoded
    size = min(CHUNK, count)
    chunks = -(-count // size)
    last = chunks * size - count  # rows that the last chunk lacks

    def chunked(rows: jax.Array, fill: int) -> jax.Array:
        rows = jnp.pad(rows, [(0, last)] + [(0, 0)] * (rows.ndim - 1), constant_values=fill)
        return rows.reshape(chunks, size, *rows.shape[1:])

    def one(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        rows, at, owner = chunk
        start, size = (layer, owner[0], 0, 0, 0), (1, 1, *keys.shape[2:])
        k, v = (lax.dynamic_slice(x, start, size)[0] for x in (keys, values))
        return _over(rows[None], k, v, at[None])[0]

    prefilled = lax.map(
        one,
        (
            chunked(q[decode_rows:], 0),
            chunked(positions[decode_rows:], -1),
            chunked(sequences[decode_rows:], 0),
        ),
        batch_size=min(together, chunks) if together > 1 else None,
    )
    prefilled = prefilled.reshape(chunks * size, *q.shape[1:])[:count]
    return jnp.concatenate([decoded, prefilled])


def _decode(
    q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array, sequences: jax.Array
) -> jax.Array:
    """Rows of one token each. Fewer rows than sequences read only their own part of the cache."""
    total = keys.shape[0]
    if q.shape[0] < total:
        keys, values = keys[sequences], values[sequences]
        return _over(q[:, None], keys, values, positions[:, None])[:, 0]
    # As many rows as sequences: bring the queries to the cache, rather than copy it for them.
    places = jnp.where(positions >= 0, sequences, total)
    placed = jnp.zeros((total, *q.shape[1:]), q.dtype).at[places].set(q, mode="drop")
    reach = jnp.full(total, -1, jnp.int32).at[places].set(positions, mode="drop")
    return _over(placed[:, None], keys, values, reach[:, None])[:, 0][sequences]


def _over(q: jax.Array, keys: jax.Array, values: jax.Array, positions: jax.Array) -> jax.Array:
    """Queries [B, Q, K, G, H] over keys and values [B, K, length, H], up to positions [B, Q]."""
    scores = jnp.einsum("bqkgh,bklh->bkgql", q, keys, preferred_element_type=jnp.float32)
    scores *= q.shape[-1] ** -0.5
    seen = jnp.arange(keys.shape[2]) <= positions[:, :, None]
    scores = jnp.where(seen[:, None, None], scores, jnp.finfo(jnp.float32).min)
    weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
    mixed = jnp.einsum("bkgql,bklh->bqkgh", weights, values, preferred_element_type=jnp.float32)
    return mixed.astype(q.dtype)
