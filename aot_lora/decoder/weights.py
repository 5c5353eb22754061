"""The weights of a decoder: their tree and shapes, and random ones."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from aot_lora.errors import ProgramError
from aot_lora.plan import COLUMN_MODULES, HEAD_MODULE, ROW_MODULES, DecoderShape, KvCache, Plan

Weights = dict[str, Any]


def decoder_of(plan: Plan) -> tuple[DecoderShape, KvCache]:
    """The sizes that a decoder step needs.

    Raises:
      ProgramError: the plan has none.
    """
    if plan.decoder is None or plan.cache is None:
        raise ProgramError(
            "the plan has no decoder and no cache",
            where="aot_lora.decoder",
            expected="`kv_cache: {sequences: .., length: ..}` in the config, and a model that is "
            "known as a decoder",
            next_step="add `kv_cache:`; beside written-out module shapes add `decoder:` as well",
        )
    return plan.decoder, plan.cache


def layers_apart(platform: str) -> bool:
    """Whether a step for this platform takes each layer's arrays by themselves.

    XLA for a GPU copies a layer out of a stack before it multiplies: a decode step of 8B took
    twice as long. A TPU's reads in place, and compiles one layer instead of all.
    """
    return platform == "cuda"


def take_apart(weights: Weights) -> Weights:
    """Stacked weights with each layer's by themselves: ``layers`` is a list of trees then."""
    stacked: dict[str, Any] = weights["layers"]
    count = len(next(iter(stacked.values())))
    apart = [{name: array[n] for name, array in stacked.items()} for n in range(count)]
    return weights | {"layers": apart}


def cache_shape(plan: Plan) -> tuple[int, ...]:
    """Keys, or values, of one layer: [S, kv_heads, length, head_dim]."""
    shape, cache = decoder_of(plan)
    return cache.sequences, shape.kv_heads, cache.length, shape.head_dim


def shapes(plan: Plan) -> Weights:
    """The shape of each weight, stacked over layers; all are of the plan's dtype.

    Returns:
      ``embed`` [V, hidden], ``norm`` [hidden], ``lm_head`` [hidden, V] unless tied, and ``layers``:
      each projection [N, D, O], ``input_norm`` and ``post_norm`` [N, hidden].
    """
    shape, _ = decoder_of(plan)
    modules = shape.modules()
    layers = {name: (plan.layers, *modules[name]) for name in (*COLUMN_MODULES, *ROW_MODULES)}
    norms = dict.fromkeys(("input_norm", "post_norm"), (plan.layers, shape.hidden))
    tree: Weights = {
        "embed": (shape.vocab, shape.hidden),
        "norm": (shape.hidden,),
        "layers": layers | norms,
    }
    return tree if shape.tied else tree | {HEAD_MODULE: modules[HEAD_MODULE]}


def host_dtype(plan: Plan) -> np.dtype[Any]:
    """The plan's dtype for numpy."""
    return np.dtype(ml_dtypes.bfloat16 if plan.dtype == "bfloat16" else plan.dtype)


def random_weights(plan: Plan, seed: int) -> Weights:
    """Weights that keep activations at their size: numpy arrays, equal for equal seeds."""
    rng = np.random.default_rng(seed)
    dtype = host_dtype(plan)

    def fill(tree: Weights) -> Weights:
        return {name: make(name, value) for name, value in tree.items()}

    def make(name: str, value: Any) -> Any:
        if isinstance(value, dict):
            return fill(value)
        if name.endswith("norm"):
            return np.ones(value, dtype)
        drawn = rng.standard_normal(value, np.float32)
        return (drawn if name == "embed" else drawn * value[-2] ** -0.5).astype(dtype)

    return fill(shapes(plan))
