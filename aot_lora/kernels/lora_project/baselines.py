"""What published systems do, on the same banks: forms like any other, and peers in benchmarks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from aot_lora.kernels.batch import Batch, has_adapter, row_blocks
from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_project.xla import Arrays, Banks, added


class Rows(NamedTuple):
    """Of each row its bank blocks [T, most] int32, 0 beyond its own, and whether it has any."""

    blocks: jax.Array
    adapted: jax.Array


def prepare_rows(batch: Batch, *, quantum: int, most: int) -> Rows:
    """Once a batch: which blocks are each row's."""
    del quantum
    return Rows(row_blocks(batch, most), has_adapter(batch))


def one_hot(x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Rows) -> Arrays:
    """``einsum("td,tX,Xld->tl", x, one_hot(index), A)``, as tpu-inference and sglang-jax have it.

    X are the resident blocks, whether active or not, and l goes up to the largest adapter. NaN in
    any resident adapter reaches every row. Args and result: see `xla.laned`.
    """
    outputs: list[jax.Array] = []
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        hot = jax.nn.one_hot(batch.blocks, a_bank.shape[1], dtype=x.dtype)
        a, b = a_bank[layer], b_bank[layer]
        h = jnp.einsum("td,tjX,Xqd->tjq", x, hot, a, preferred_element_type=jnp.float32)
        delta = jnp.einsum(
            "tjq,tjX,Xqo->to", h.astype(x.dtype), hot, b, preferred_element_type=jnp.float32
        )
        outputs.append(added(x @ weight, delta, batch.adapted))
    return tuple(outputs)


def gather(x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Rows) -> Arrays:
    """Each row's adapter gathered for it alone ("BGMV" in plain XLA). Args: see `xla.laned`."""
    outputs: list[jax.Array] = []
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        a, b = a_bank[layer][batch.blocks], b_bank[layer][batch.blocks]
        h = jnp.einsum("td,tjqd->tjq", x, a, preferred_element_type=jnp.float32)
        delta = jnp.einsum("tjq,tjqo->to", h.astype(x.dtype), b, preferred_element_type=jnp.float32)
        outputs.append(added(x @ weight, delta, batch.adapted))
    return tuple(outputs)


class Sorted(NamedTuple):
    """Rows grouped by adapter, for `ragged_dot`. A group is named by its adapter's first block.

    Args:
      order: [T] int32, rows in the order of their groups; rows without adapter come last.
      back: [T] int32, where each row went.
      sizes: [n] int32, rows of each group.
      blocks: [n, most] int32, bank blocks of each group's adapter, 0 beyond them.
      adapted: [T, 1] bool.
    """

    order: jax.Array
    back: jax.Array
    sizes: jax.Array
    blocks: jax.Array
    adapted: jax.Array


def prepare_sorted(batch: Batch, *, quantum: int, most: int) -> Sorted:
    """Once a batch: sorts its rows."""
    del quantum
    count = batch.blocks.shape[0]
    own = batch.slots[:, None] == batch.owners[None, :]
    group = jnp.where(own.any(axis=1), jnp.argmax(own, axis=1), count)
    order = jnp.argsort(group, stable=True)
    sizes = jnp.sum(group[:, None] == jnp.arange(count)[None, :], axis=0, dtype=jnp.int32)
    after = jnp.arange(count)[:, None] + jnp.arange(most)[None, :]
    inside = jnp.minimum(after, count - 1)
    same = (after < count) & (batch.owners[inside] == batch.owners[:, None])
    blocks = jnp.where(same, batch.blocks[inside], 0)
    return Sorted(order, jnp.argsort(order), sizes, blocks, has_adapter(batch))


def ragged(x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Sorted) -> Arrays:
    """Sorted rows and `jax.lax.ragged_dot` ("SGMV" in plain XLA). Args: see `xla.laned`."""
    outputs: list[jax.Array] = []
    rows = x[batch.order]
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        a, b = (
            bank[layer][batch.blocks].reshape(len(batch.blocks), -1, bank.shape[-1])
            for bank in (a_bank, b_bank)
        )
        h = lax.ragged_dot(rows, a.swapaxes(1, 2), batch.sizes, preferred_element_type=jnp.float32)
        delta = lax.ragged_dot(
            h.astype(x.dtype), b, batch.sizes, preferred_element_type=jnp.float32
        )
        outputs.append(added(x @ weight, delta[batch.back], batch.adapted))
    return tuple(outputs)
