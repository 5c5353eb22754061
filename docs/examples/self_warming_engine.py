"""An engine that warms itself up by dummy runs, started from a recording instead of a compiler.

AOT_LORA_JIT=record:engine python docs/examples/self_warming_engine.py   # once, before the deploy
AOT_LORA_JIT=sealed:engine python docs/examples/self_warming_engine.py   # every start
"""

import functools
import time

import jax
import jax.numpy as jnp
import numpy as np

import aot_lora

BUCKETS = (8, 16, 32, 64)


# The one line that changes: it was `jax.jit`.
@functools.partial(aot_lora.jit, static_argnames="layers", donate_argnames="cache")
def step(weights: jax.Array, cache: jax.Array, x: jax.Array, *, layers: int):
    """[T, 64] activations through so many layers; the cache remembers their sum."""
    for n in range(layers):
        x = x + jax.nn.silu(x @ weights[n])
    return x, cache + jnp.sum(x, axis=0)


class Engine:
    """Pads every batch to a bucket, so that its warm-up meets all shapes."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.weights = jax.device_put(rng.standard_normal((4, 64, 64), np.float32) / 64)
        self.cache = jax.device_put(np.zeros(64, np.float32))

    def warm_up(self) -> None:
        """The engine's own: a dummy run per bucket. numpy and device_put compile nothing."""
        for tokens in BUCKETS:
            self.run(np.zeros((tokens, 64), np.float32))

    def run(self, x: np.ndarray) -> np.ndarray:
        """[n, 64] for any n up to the largest bucket."""
        padded = np.zeros((next(b for b in BUCKETS if b >= len(x)), 64), np.float32)
        padded[: len(x)] = x
        y, self.cache = step(self.weights, self.cache, jax.device_put(padded), layers=4)
        return np.asarray(y)[: len(x)]


if __name__ == "__main__":
    engine = Engine()
    began = time.perf_counter()
    engine.warm_up()
    print(f"warmed up in {time.perf_counter() - began:.2f} s")
    print(f"37 rows: {np.abs(engine.run(np.ones((37, 64), np.float32))).sum():.3f}")
