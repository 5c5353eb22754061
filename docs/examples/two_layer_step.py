"""A user's own program: a two-layer step with the LoRA kernels inside.

`aot-lora warmup docs/examples/two_layer_step.yaml` calls `step` once per point and compiles what
it returns; `serve_two_layer_step.py` looks it up.
"""

import jax.numpy as jnp

from aot_lora import Context, Point, Program
from aot_lora.kernels import lora_expand, lora_shrink


def step(point: Point, context: Context) -> Program:
    """The step for one point: [T, 64] activations through two projections with adapters."""
    up, down = (context.plan.modules[i] for i in (0, 1))
    batch = context.batch(point.tokens, point.lanes)
    weights = (context.array(up.d, up.o), context.array(down.d, down.o))
    x = context.array(point.tokens, up.d)
    if point.lanes == 0:  # a batch without adapters pays nothing for them
        return Program(fn=_base, args=(x, weights))
    banks = (context.banks(up), context.banks(down))
    return Program(
        fn=_with_adapters,
        args=(x, weights, banks, batch.blocks, batch.owners, batch.slots),
    )


def _base(x, weights):
    w_up, w_down = weights
    return jnp.maximum(x @ w_up, 0) @ w_down


def _with_adapters(x, weights, banks, blocks, owners, slots):
    for w, (a_bank, b_bank), last in zip(weights, banks, (False, True), strict=True):
        h = lora_shrink(x, a_bank, 0, blocks, owners, slots)
        x = lora_expand(x @ w, h, b_bank, 0, blocks, slots)
        x = x if last else jnp.maximum(x, 0)
    return x
