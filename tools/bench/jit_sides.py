"""The sides of `jit.py`, each in a fresh process: `jit_sides.py SIDE FOLDER LAYERS TOKENS START`.

A small engine that warms itself up by dummy runs of a decoder step with LoRA inside, its layers
unrolled in Python, once per token bucket. START is the clock when this process was started. Prints
one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

IMPORTED = time.monotonic()

WIDTH, RANK, ADAPTERS, CONTEXT = 64, 8, 4, 64


def step(weights: Any, cache: Any, x: Any, slots: Any, position: Any) -> tuple[Any, Any]:
    """[T, D] activations through all layers; each writes its keys into the cache at `position`."""
    written: list[Any] = []
    for layer, keys in zip(weights, cache, strict=True):
        h = _adapted(layer["qkv"], layer["qkv_lora"], x, slots)
        q, k, v = jnp.split(h, 3, axis=1)
        keys = jax.lax.dynamic_update_slice(keys, k[:1], (position, 0))
        scores = jax.nn.softmax(q @ keys.T / WIDTH**0.5, axis=1)
        x = x + (scores @ keys + v) / 2
        gate = _adapted(layer["up"], layer["up_lora"], x, slots)
        x = x + jax.nn.silu(gate) @ layer["down"]
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6)
        written.append(keys)
    return x, written


def _adapted(base: Any, lora: Any, x: Any, slots: Any) -> Any:
    a, b = lora
    picked = jax.nn.one_hot(slots, ADAPTERS, dtype=x.dtype)
    return x @ base + jnp.einsum("td,adr,aro,ta->to", x, a, b, picked)


def inputs(layers: int, tokens: list[int]) -> tuple[Any, Any, list[Any]]:
    """Weights, cache and a batch per bucket, made by numpy: that compiles nothing."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / 8).astype(np.float32)

    weights = [
        {
            "qkv": normal(WIDTH, 3 * WIDTH),
            "qkv_lora": (normal(ADAPTERS, WIDTH, RANK), normal(ADAPTERS, RANK, 3 * WIDTH)),
            "up": normal(WIDTH, 2 * WIDTH),
            "up_lora": (normal(ADAPTERS, WIDTH, RANK), normal(ADAPTERS, RANK, 2 * WIDTH)),
            "down": normal(2 * WIDTH, WIDTH),
        }
        for _ in range(layers)
    ]
    cache = [np.zeros((CONTEXT, WIDTH), np.float32) for _ in range(layers)]
    batches = [(normal(count, WIDTH), (np.arange(count) % ADAPTERS)) for count in tokens]
    return jax.block_until_ready(jax.device_put((weights, cache, batches)))


def warm_up(run: Any, weights: Any, cache: Any, batches: list[Any]) -> list[Any]:
    """The engine's own warm-up: one dummy run per bucket."""
    found: list[Any] = []
    for x, slots in batches:
        out, cache = run(weights, cache, x, slots, 3)
        found.append(out)
    return jax.block_until_ready(found)


def main() -> None:
    """Runs a side and prints what it took, and a digest of its results."""
    side, folder, layers, tokens, start = sys.argv[1:]
    store = Path(folder) / "store"
    found: dict[str, float] = {}
    events: list[str] = []
    opened: Any = None
    if side in ("cold", "cached"):
        run: Any = jax.jit(step, donate_argnums=1)
    else:
        import aot_lora

        jax.monitoring.register_event_duration_secs_listener(
            lambda name, *_, **__: events.append(name)
        )
        run = aot_lora.jit(step, program="step", donate_argnums=1)
        opened = aot_lora.recording if side == "record" else aot_lora.replay
    began = time.monotonic()
    arguments = inputs(int(layers), [int(count) for count in tokens.split(",")])
    spent = time.monotonic() - began
    began = time.monotonic()
    if side == "record":
        with opened("bench", store):
            results = warm_up(run, *arguments)
    else:
        if side == "sealed":
            opened("bench", store)
        else:
            weights, cache, batches = arguments
            for batch in batches:  # What the first calls find compiled.
                run.lower(weights, cache, *batch, 3).compile()
        found["ready"] = time.monotonic() - began
        results = warm_up(run, *arguments)
    now = time.monotonic()
    found |= {
        "warm_up": now - began,
        "from_import": now - IMPORTED - spent,
        "from_start": now - float(start) - spent,
        "sum": float(sum(np.abs(np.asarray(out)).sum() for out in results)),
        "traces": float(sum("trace" in name for name in events)),
    }
    print(json.dumps(found), flush=True)
    os._exit(0)  # Taking everything down is nobody's start.


if __name__ == "__main__":
    main()
