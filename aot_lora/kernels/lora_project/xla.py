"""lora_project in plain XLA: the lanes of all active adapters side by side, dense matmuls."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.batch import Batch, has_adapter, own_lanes
from aot_lora.kernels.blocks import Layer, gather_lanes

Arrays = tuple[jax.Array, ...]
Banks = tuple[tuple[jax.Array, jax.Array], ...]


class Laned(NamedTuple):
    """What `laned` needs of a batch, for all modules and layers.

    Args:
      blocks: [L / quantum] int32; own: [T, L] bool; adapted: [T, 1] bool.
    """

    blocks: jax.Array
    own: jax.Array
    adapted: jax.Array


def prepare(batch: Batch, *, quantum: int, most: int) -> Laned:
    """Once a batch: the mask of lanes."""
    del most
    return Laned(batch.blocks, own_lanes(batch, quantum), has_adapter(batch))


def laned(x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Laned) -> Arrays:
    """Projections that share one shrink ("laning", vLLM PR 15655).

    Args:
      x: [T, D].
      weights: [D, O] of each projection.
      banks: A [layers, blocks, quantum, D] and B [layers, blocks, quantum, O] of each.
      layer: which of the banks' layers; int32 scalar or Python integer.
      batch: from `prepare`.

    Returns:
      [T, O] of each, in the dtype of `x`; sums are float32; rows without adapter are x @ weight.
    """
    lanes = [gather_lanes(a_bank, layer, batch.blocks) for a_bank, _ in banks]
    h = lax.dot_general(
        x, jnp.concatenate(lanes), (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    width = batch.own.shape[1]
    outputs: list[jax.Array] = []
    for index, (weight, (_, b_bank)) in enumerate(zip(weights, banks, strict=True)):
        own = lax.slice_in_dim(h, index * width, (index + 1) * width, axis=1)
        masked = jnp.where(batch.own, own, jnp.zeros_like(own)).astype(x.dtype)
        delta = lax.dot_general(
            masked,
            gather_lanes(b_bank, layer, batch.blocks),
            (((1,), (0,)), ((), ())),
            preferred_element_type=jnp.float32,
        )
        outputs.append(added(x @ weight, delta, batch.adapted))
    return tuple(outputs)


def added(base: jax.Array, delta: jax.Array, adapted: jax.Array) -> jax.Array:
    """base + delta in float32 where a row has an adapter; bit for bit the base elsewhere."""
    total = (base.astype(jnp.float32) + delta).astype(base.dtype)
    return jnp.where(adapted, total, base)
