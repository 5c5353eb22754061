"""Priming: every executable runs once before the first request does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

from aot_lora.runtime.load import Loaded
from aot_lora.signature import ArraySpec


def prime(loaded: Iterable[Loaded]) -> None:
    """Runs each executable once, on zeros, and waits: first runs load code and set up memory.

    Arrays of one shape are shared, so that a step whose layers are alike needs the memory of one.

    Args:
      loaded: what to run; the banks should not be there yet.
    """
    shared: dict[tuple[tuple[int, ...], str, Any], jax.Array] = {}

    def zeros(spec: ArraySpec, place: Any) -> jax.Array:
        return jax.device_put(np.zeros(spec.shape, jax.numpy.dtype(spec.dtype)), place)

    for executable, signature in loaded:
        kept = jax.tree.leaves(executable.input_shardings)
        places = dict(zip(signature.kept, kept, strict=True))
        leaves: list[Any] = []
        for index, spec in enumerate(signature.inputs):
            place = places.get(index)
            key = (spec.shape, spec.dtype, place)
            if index in signature.donated:
                leaves.append(zeros(spec, place))
                continue
            if key not in shared:
                shared[key] = zeros(spec, place)
            leaves.append(shared[key])
        arguments, named = jax.tree.unflatten(executable.in_tree, leaves)
        jax.block_until_ready(executable(*arguments, **named))
