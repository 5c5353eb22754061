"""Layers of the engine."""

import jax
import jax.numpy as jnp
import numpy as np

FREQUENCIES = np.arange(4, dtype="float32") / 4


def norm(x, weight):
    mean = jnp.mean(x * x, axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(mean + 1e-6) * weight


@jax.jit
def gate(x):
    return jnp.tanh(x) * x


@jax.jit
def _positions(count):
    return jnp.outer(count, FREQUENCIES).sum(axis=-1)


def mlp(x, up, down):
    hidden = gate(x @ up)
    return jax.lax.fori_loop(0, 2, lambda i, y: gate(y), hidden) @ down
