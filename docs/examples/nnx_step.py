"""A Flax NNX model as a program of a plan: its state is an argument, its structure is code.

`aot-lora warmup docs/examples/nnx_step.yaml` compiles `step` once per point, from abstract shapes;
`serve_nnx_step.py` looks it up.
"""

import jax
from flax import nnx

from aot_lora import Context, Point, Program
from aot_lora.kernels import lora_expand, lora_shrink


class Mlp(nnx.Module):
    """Two projections; `adapt(name, x, base)` adds the adapters of a batch."""

    def __init__(self, rngs: nnx.Rngs):
        self.up_proj = nnx.Linear(64, 128, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(128, 64, use_bias=False, rngs=rngs)

    def __call__(self, x, adapt):
        x = jax.nn.relu(adapt("up_proj", x, self.up_proj(x)))
        return adapt("down_proj", x, self.down_proj(x))


def weights(model: Mlp):
    """The model's state as plain dicts, which a store can describe."""
    return nnx.to_pure_dict(nnx.state(model))


def step(point: Point, context: Context) -> Program:
    """The step for one point; no weight is made to compile it."""
    abstract = nnx.eval_shape(lambda: Mlp(nnx.Rngs(0)))
    graph, _ = nnx.split(abstract)
    x = context.array(point.tokens, 64)
    if point.lanes == 0:
        return Program(fn=lambda w, x: nnx.merge(graph, w)(x, _alone), args=(weights(abstract), x))

    def adapted(w, x, banks, blocks, owners, slots):
        def adapt(name, x, base):
            a_bank, b_bank = banks[name]
            h = lora_shrink(x, a_bank, 0, blocks, owners, slots)
            return lora_expand(base, h, b_bank, 0, blocks, slots)

        return nnx.merge(graph, w)(x, adapt)

    banks = {module.name: context.banks(module) for module in context.plan.modules}
    batch = context.batch(point.tokens, point.lanes)
    args = (weights(abstract), x, banks, batch.blocks, batch.owners, batch.slots)
    return Program(fn=adapted, args=args)


def _alone(name, x, base):
    return base
