"""What the tests of the decoder share: a tiny model, its adapters, and the model by definition."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from adapter_files import path_of, random_pair, write_adapter

from aot_lora.plan import DecoderShape, Plan

DECODER = """\
model: {q_proj: [32, 32], k_proj: [32, 16], v_proj: [32, 16], o_proj: [32, 32],
        gate_proj: [32, 48], up_proj: [32, 48], down_proj: [48, 32]}
layers: 2
decoder:
  hidden: 32
  heads: 4
  kv_heads: 2
  head_dim: 8
  intermediate: 48
  vocab: 97
  norm_eps: 1.0e-5
  rope_theta: 10000.0
  rope_scaling: {factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_length: 16}
kv_cache: {sequences: 4, length: 48}
target: {platform: cpu}
lora:
  modules: [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head]
  ranks: [4, 16]
  slots: [0, 3]
  max_adapters: 4
  dtype: float32
tokens: {budget: 24, buckets: [4, 24]}
programs:
  - lora
  - {entry: "aot_lora.decoder:mixed_step"}
  - {entry: "aot_lora.decoder:decode_step"}
store: {root: store}
"""

Weights = Mapping[str, Any]
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def adapter_pairs(plan: Plan, *, rank: int, seed: int, modules: Sequence[str] = ()) -> Pairs:
    """Random A [rank, D] and B [O, rank] of each module of a plan (or of `modules`), by path."""
    rng = np.random.default_rng(seed)
    pairs: Pairs = {}
    for module in plan.modules:
        if modules and module.name not in modules:
            continue
        for layer in range(module.layers) if module.layers > 1 else (None,):
            a, b = random_pair(rng, rank=rank, d=module.d, o=module.o)
            pairs[path_of(module.name, layer)] = a * module.d**-0.5, b * rank**-0.5
    return pairs


def write_adapters(folder: Path, plan: Plan) -> dict[str, Pairs]:
    """Three adapter folders of mixed ranks, one of which changes few modules."""
    adapters = {
        "small": adapter_pairs(plan, rank=3, seed=1),
        "large": adapter_pairs(plan, rank=16, seed=2),
        "few": adapter_pairs(plan, rank=8, seed=3, modules=("q_proj", "down_proj", "lm_head")),
    }
    for name, pairs in adapters.items():
        write_adapter(folder / name, pairs)
    return adapters


def continued(
    shape: DecoderShape, weights: Weights, prompt: Sequence[int], count: int, adapter: Pairs | None
) -> list[int]:
    """The most likely continuation by definition: no cache, no batch, float64."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits(shape, weights, tokens, adapter or {})[-1].argmax()))
    return tokens[len(prompt) :]


def logits(
    shape: DecoderShape, weights: Weights, tokens: Sequence[int], adapter: Pairs
) -> np.ndarray:
    """[tokens, V] of one whole sequence, written out."""
    x = weights["embed"][list(tokens)].astype(np.float64)
    count, layers = len(tokens), weights["layers"]

    def project(name: str, layer: int | None, x: np.ndarray) -> np.ndarray:
        y = x @ (weights[name] if layer is None else layers[name][layer])
        pair = adapter.get(path_of(name, layer))
        return y if pair is None else y + x @ pair[0].T @ pair[1].T

    def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + shape.norm_eps) * weight

    turned = np.arange(count)[:, None] * _frequencies(shape)
    turn = np.exp(1j * turned)[:, None]
    half = shape.head_dim // 2

    def heads(y: np.ndarray, *, rotated: bool) -> np.ndarray:
        y = y.reshape(count, -1, shape.head_dim)
        if not rotated:
            return y
        z = (y[..., :half] + 1j * y[..., half:]) * turn
        return np.concatenate([z.real, z.imag], axis=-1)

    for layer in range(layers["q_proj"].shape[0]):
        h = norm(x, layers["input_norm"][layer])
        q, k = (heads(project(n, layer, h), rotated=True) for n in ("q_proj", "k_proj"))
        v = heads(project("v_proj", layer, h), rotated=False)
        group = shape.heads // shape.kv_heads
        k, v = (np.repeat(y, group, axis=1) for y in (k, v))
        scores = np.einsum("qhd,lhd->hql", q, k) / shape.head_dim**0.5
        scores = np.where(np.tril(np.ones((count, count), bool)), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        mixed = np.einsum("hql,lhd->qhd", shares, v).reshape(count, -1)
        x = x + project("o_proj", layer, mixed)
        h = norm(x, layers["post_norm"][layer])
        gate = project("gate_proj", layer, h)
        inner = gate / (1 + np.exp(-gate)) * project("up_proj", layer, h)
        x = x + project("down_proj", layer, inner)
    x = norm(x, weights["norm"])
    head = weights["embed"].T if shape.tied else weights["lm_head"]
    pair = adapter.get("lm_head")
    return x @ head + (0 if pair is None else x @ pair[0].T @ pair[1].T)


def _frequencies(shape: DecoderShape) -> np.ndarray:
    """Llama's, one at a time, as transformers has them."""
    found: list[float] = []
    for index in range(shape.head_dim // 2):
        plain = shape.rope_theta ** (-2 * index / shape.head_dim)
        scaling = shape.rope_scaling
        if scaling is not None:
            length = 2 * np.pi / plain
            if length > scaling.original_length / scaling.low_freq_factor:
                plain /= scaling.factor
            elif length >= scaling.original_length / scaling.high_freq_factor:
                smooth = (scaling.original_length / length - scaling.low_freq_factor) / (
                    scaling.high_freq_factor - scaling.low_freq_factor
                )
                plain = (1 - smooth) * plain / scaling.factor + smooth * plain
        found.append(plain)
    return np.array(found)
