"""Forms of lora_project made of the Pallas TPU kernels.

Tuning is a bound: block sizes are the largest up to it that divide the sizes at hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from aot_lora.kernels.batch import Batch
from aot_lora.kernels.blocks import Layer
from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_fused import pallas_tpu as fuse
from aot_lora.kernels.lora_project.xla import Arrays, Banks
from aot_lora.kernels.lora_segments import pallas_tpu as segment
from aot_lora.kernels.lora_segments.segments import Segments, segments
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink
from aot_lora.kernels.sizes import STACKED, Sizes
from aot_lora.kernels.tpu_sizes import fitted, segments_sizes
from aot_lora.kernels.tpu_stream import Mask, column, mask_of


class Masked(NamedTuple):
    """What the laned kernels need of a batch: its blocks [L / quantum] int32 and its mask."""

    blocks: jax.Array
    mask: Mask


def prepare(batch: Batch, *, quantum: int, most: int) -> Masked:
    """Once a batch: the mask of lanes."""
    del most
    return Masked(batch.blocks, mask_of(batch.owners, batch.slots, quantum))


def laned(
    x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Masked, **tuning: int
) -> Arrays:
    """Shrink, the base projection by XLA, and the expand added into it in place.

    Args:
      x, weights, banks, layer, batch: see `xla.laned`; `batch` is from `prepare`.
      tuning: shrink_t, shrink_d, expand_t, expand_o.
    """
    outputs: list[jax.Array] = []
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        sizes = _sizes("shrink", tuning, x, weight)
        h = shrink.masked_shrink(x, a_bank, layer, batch.blocks, batch.mask, **sizes)
        sizes, base = _sizes("expand", tuning, x, weight), x @ weight
        outputs.append(
            expand.masked_expand(base, h, b_bank, layer, batch.blocks, batch.mask.slots, **sizes)
        )
    return tuple(outputs)


def fused(
    x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Masked, **tuning: int
) -> Arrays:
    """Shrink, then the base projection and the expand in one pass.

    Rows without an adapter are x @ weight as this kernel sums it, not as XLA does.

    Args:
      x, weights, banks, layer, batch: see `xla.laned`; `batch` is from `prepare`.
      tuning: shrink_t, shrink_d, fused_t, fused_d, fused_o.
    """
    outputs: list[jax.Array] = []
    for weight, (a_bank, b_bank) in zip(weights, banks, strict=True):
        sizes = _sizes("shrink", tuning, x, weight)
        h = shrink.masked_shrink(x, a_bank, layer, batch.blocks, batch.mask, **sizes)
        sizes = _sizes("fused", tuning, x, weight)
        outputs.append(
            fuse.masked_fused(x, weight, h, b_bank, layer, batch.blocks, batch.mask.slots, **sizes)
        )
    return tuple(outputs)


class Listed(NamedTuple):
    """What `segmented` needs of a batch: lists, owners of their lanes, and slots [T, 1]."""

    batch: Segments
    owners: jax.Array
    slots: jax.Array


def prepare_segments(batch: Batch, *, quantum: int, most: int) -> Listed:
    """Once a batch: what each block of tokens needs."""
    del most
    tokens, lanes = batch.slots.shape[0], batch.blocks.shape[0] * quantum
    block_t = segments_sizes(tokens, lanes, 128, 128, quantum, 2)["block_t"]
    listed = segments(batch.blocks, batch.owners, batch.slots, block_t)
    return Listed(listed, segment.listed_lanes(listed, quantum), column(batch.slots))


def segmented(
    x: jax.Array, weights: Arrays, banks: Banks, layer: Layer, batch: Listed, **tuning: int
) -> Arrays:
    """The base projection by XLA, then shrink and expand in one kernel, absent blocks unread.

    Args:
      x, weights, banks, layer, batch: see `xla.laned`; `batch` is from `prepare_segments`.
      tuning: segments_o.
    """
    return tuple(
        segment.masked_segments(
            x @ weight, x, *bank, layer, *batch, **_sizes("segments", tuning, x, weight)
        )
        for weight, bank in zip(weights, banks, strict=True)
    )


def supports_laned(sizes: Sizes, platform: str) -> str:
    """Why `laned` cannot serve these sizes; empty where it can."""
    return _first(shrink.supports, (sizes.d,), sizes, platform) or _each(
        expand.supports, lambda o: (o,), sizes, platform
    )


def supports_fused(sizes: Sizes, platform: str) -> str:
    """Why `fused` cannot serve these sizes; empty where it can."""
    if sizes.stacked:
        return STACKED
    return _first(shrink.supports, (sizes.d,), sizes, platform) or _each(
        fuse.supports, lambda o: (sizes.d, o), sizes, platform
    )


def supports_segments(sizes: Sizes, platform: str) -> str:
    """Why `segmented` cannot serve these sizes; empty where it can."""
    return _each(segment.supports, lambda o: (sizes.d, o), sizes, platform)


def _each(supports: Any, widths: Any, sizes: Sizes, platform: str) -> str:
    reasons = (_first(supports, widths(o), sizes, platform) for o in sizes.o)
    return next(filter(None, reasons), "")


def _first(supports: Any, widths: tuple[int, ...], sizes: Sizes, platform: str) -> str:
    if platform != "tpu":
        return "it is a kernel for TPUs"
    if any(width % 128 for width in widths):
        return f"widths {', '.join(map(str, widths))} are not multiples of 128"
    itemsize = jnp.dtype(sizes.dtype).itemsize
    return supports(sizes.tokens, sizes.lanes, *widths, sizes.quantum, itemsize)


def _sizes(kernel: str, tuning: dict[str, int], x: jax.Array, w: jax.Array) -> dict[str, int]:
    """A kernel's part of a form's tuning, fitted: ``shrink_t`` is block_t of the shrink."""
    caps = {
        f"block_{name.rpartition('_')[2]}": value
        for name, value in tuning.items()
        if name.startswith(kernel)
    }
    return fitted(caps, x.shape[0], x.shape[1], w.shape[1])
