"""The step: a batch of rows through all layers, and one token for each sequence that asks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.decoder.attention import attend
from aot_lora.decoder.lora import Lora, no_lora
from aot_lora.decoder.rope import angles, rotate
from aot_lora.decoder.sampling import sample
from aot_lora.kernels.blocks import Layer
from aot_lora.plan import HEAD_MODULE, DecoderShape

Tree = dict[str, Any]


def step(
    shape: DecoderShape,
    weights: Tree,
    cache: Tree,
    rows: Tree,
    sampling: Tree,
    *,
    decode_rows: int,
    lora: Lora = no_lora,
    head_lora: Lora = no_lora,
    axis: str | None = None,
    together: int = 1,
) -> tuple[jax.Array, Tree]:
    """Runs a batch: writes its keys and values, and samples.

    Under `jax.shard_map` the arrays are shards, as `specs` splits them; sums over `axis` are then
    taken where Megatron takes them (Shoeybi et al., arXiv 1909.08053), and adapters add none.

    Args:
      shape: the model.
      weights: as `weights.shapes` has them, or each layer's apart.
      cache: ``k`` and ``v``, each [N, S, kv_heads, length, head_dim], or a list of N without that
        axis; donate it.
      rows: ``tokens``, ``positions`` (-1 is padding) and ``sequences``, each [T] int32.
      sampling: ``rows`` [S] int32, the row to sample for each sequence or -1; ``temperature`` [S]
        float32, 0 for the most likely token; ``seeds`` [S] uint32.
      decode_rows: rows at the front that are one token each of a sequence of their own; after them
        come chunks of `CHUNK` rows, each of one sequence.
      lora: adds adapters to the rows; head_lora: to the sampled ones.
      axis: the mesh axis of tensor parallelism.
      together: chunks whose attention is computed at a time.

    Returns:
      (tokens [S] int32, -1 where none was asked for; the cache).
    """
    positions, sequences = rows["positions"], rows["sequences"]
    turn = angles(shape, positions)
    length = cache["k"][0].shape[2]
    places = jnp.where(positions >= 0, positions, length)  # beyond the cache: dropped

    def total(partial: jax.Array) -> jax.Array:
        return lax.psum(partial, axis) if axis else partial

    def layer(x: jax.Array, cache: Tree, own: Tree, index: Layer, bank: Layer) -> tuple[Any, Tree]:
        """One layer, `index` of the cache and `bank` of the banks."""

        def project(x: jax.Array, *site: str) -> tuple[jax.Array, ...]:
            return lora(site, x, tuple(own[name] for name in site), bank)

        normed = rms_norm(x, own["input_norm"], shape.norm_eps)
        q, k, v = (
            projected.reshape(x.shape[0], -1, shape.head_dim)
            for projected in project(normed, "q_proj", "k_proj", "v_proj")
        )
        new = {"k": rotate(k, turn), "v": v}
        cache = {
            name: cache[name]
            .at[index, sequences[:, None], jnp.arange(k.shape[1]), places[:, None]]
            .set(new[name], mode="drop")
            for name in cache
        }
        grouped = rotate(q, turn).reshape(x.shape[0], k.shape[1], -1, shape.head_dim)
        mixed = attend(
            grouped,
            cache["k"],
            cache["v"],
            index,
            positions,
            sequences,
            decode_rows=decode_rows,
            together=together,
        )
        x = x + total(project(mixed.reshape(x.shape[0], -1), "o_proj")[0])

        normed = rms_norm(x, own["post_norm"], shape.norm_eps)
        gate, up = project(normed, "gate_proj", "up_proj")
        return x + total(project(jax.nn.silu(gate) * up, "down_proj")[0]), cache

    x = total(_embed(weights["embed"], rows["tokens"], axis))
    if isinstance(weights["layers"], list):
        apart: list[Tree] = []
        for number, own in enumerate(weights["layers"]):
            held = {name: cache[name][number][None] for name in ("k", "v")}
            x, held = layer(x, held, own, 0, number)
            apart.append(held)
        cache = {name: [held[name][0] for held in apart] for name in ("k", "v")}
    else:

        def scanned(carry: Any, inputs: Any) -> tuple[Any, None]:
            (x, cache), (own, index) = carry, inputs
            return layer(x, cache, own, index, index), None

        indices = jnp.arange(cache["k"].shape[0], dtype=jnp.int32)
        (x, cache), _ = lax.scan(scanned, (x, cache), (weights["layers"], indices))

    wanted = sampling["rows"]
    picked = rms_norm(x[wanted], weights["norm"], shape.norm_eps)
    head = weights["embed"].T if shape.tied else weights[HEAD_MODULE]
    logits = head_lora((HEAD_MODULE,), picked, (head,), 0)[0].astype(jnp.float32)
    tokens = sample(
        logits, sampling["temperature"], sampling["seeds"], positions[wanted], axis=axis
    )
    return jnp.where(wanted >= 0, tokens, -1), cache


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """RMSNorm of [T, hidden] (Zhang and Sennrich, arXiv 1910.07467), float32 inside."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return weight * (wide * scale).astype(x.dtype)


def _embed(table: jax.Array, tokens: jax.Array, axis: str | None) -> jax.Array:
    """Rows of the embedding; zero for the tokens that another shard has."""
    if not axis:
        return table[tokens]
    local = tokens - lax.axis_index(axis) * table.shape[0]
    own = (local >= 0) & (local < table.shape[0])
    return jnp.where(own[:, None], table[jnp.where(own, local, 0)], 0)
