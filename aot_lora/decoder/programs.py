"""The decoder's steps as programs of a plan: their arguments at each point."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec

from aot_lora.config.tables import table_of
from aot_lora.decoder.lora import HEAD_SITES, LAYER_SITES, LoraMaker, tabled_lora
from aot_lora.decoder.model import Tree, step
from aot_lora.decoder.sharding import Specs, specs
from aot_lora.decoder.weights import cache_shape, decoder_of, layers_apart, shapes
from aot_lora.kernels.batch import Batch
from aot_lora.programs.mesh import AXIS
from aot_lora.programs.spec import Context, Point, Program


def mixed_step(point: Point, context: Context) -> Program:
    """Decode rows of up to every sequence at the front, then chunks of prompts.

    A point of no more rows than the cache has sequences holds decode rows alone.

    Raises:
      ProgramError: the plan has no decoder or no cache.
    """
    _, cache = decoder_of(context.plan)
    return step_program(point, context, decode_rows=min(point.tokens, cache.sequences))


def decode_step(point: Point, context: Context) -> Program:
    """One token of each sequence. Rows beyond the cache's sequences are ignored: none is left.

    Raises:
      ProgramError: the plan has no decoder or no cache.
    """
    _, cache = decoder_of(context.plan)
    return step_program(
        point, context, decode_rows=min(point.tokens, cache.sequences), prefill=False
    )


def step_program(
    point: Point,
    context: Context,
    *,
    decode_rows: int,
    prefill: bool = True,
    lora: LoraMaker | None = None,
) -> Program:
    """A step of a point, with adapters where it has lanes.

    Its function takes (weights, cache, rows, sampling), and where there are lanes also (banks by
    module, batch), the batch being ``blocks`` and ``owners`` [L / quantum] and ``slots`` [T].

    Args:
      point, context: as a user's function gets them.
      decode_rows: rows at the front that are each of a sequence of their own.
      prefill: whether the rows after them are run.
      lora: makes the function that adds adapters; unless given, by what was measured for the
        target's hardware.

    Raises:
      ProgramError: the plan has no decoder or no cache.
    """
    plan = context.plan
    shape, _ = decoder_of(plan)
    by = _specs(context)
    run = partial(
        step,
        shape,
        decode_rows=decode_rows,
        axis=AXIS if context.mesh else None,
        # One at a time leaves a GPU idle; a TPU is busy with one, and its memory is smaller.
        together=8 if context.target.platform == "cuda" else 1,
    )
    used = point.tokens if prefill else decode_rows
    maker = lora or tabled_lora(
        table_of(context.target),
        context.target.platform,
        most=plan.most_blocks,
        stacked=not layers_apart(context.target.platform),
    )

    def base_step(weights: Tree, cache: Tree, rows: Tree, sampling: Tree) -> Any:
        rows = {name: array[:used] for name, array in rows.items()}
        return run(weights, cache, rows, sampling)

    def lora_step(
        weights: Tree, cache: Tree, rows: Tree, sampling: Tree, banks: Any, batch: Tree
    ) -> Any:
        rows = {name: array[:used] for name, array in rows.items()}
        of_rows = Batch(batch["blocks"], batch["owners"], batch["slots"][:used])
        sampled = of_rows._replace(slots=of_rows.slots[sampling["rows"]])
        added = maker(banks, of_rows, LAYER_SITES)
        head = maker(banks, sampled, HEAD_SITES)
        return run(weights, cache, rows, sampling, lora=added, head_lora=head)

    fn: Callable[..., Any] = lora_step if point.lanes else base_step
    if context.mesh:
        whole = PartitionSpec()
        arguments = (by.weights, by.cache, whole, whole)
        arguments += (by.banks, whole) if point.lanes else ()
        fn = jax.shard_map(fn, mesh=context.mesh, in_specs=arguments, out_specs=(whole, by.cache))
    return Program(fn=fn, args=step_args(point, context), donate=(1,))


def _specs(context: Context) -> Specs:
    target = context.target
    return specs(context.plan, tp=target.devices, apart=layers_apart(target.platform))


def step_args(point: Point, context: Context) -> tuple[Any, ...]:
    """The abstract arguments of a step, in its order."""
    plan, array = context.plan, context.array
    sequences, by = decoder_of(plan)[1].sequences, _specs(context)
    sizes, one = shapes(plan), cache_shape(plan)
    if layers_apart(context.target.platform):
        own = {name: size[1:] for name, size in sizes["layers"].items()}
        sizes |= {"layers": [own] * plan.layers}
    else:
        one = (plan.layers, *one)

    def arrays(by: Any, sizes: Any) -> Any:
        return jax.tree.map(lambda spec, size: array(*size, spec=spec), by, sizes)

    rows = {name: array(point.tokens, dtype="int32") for name in ("tokens", "positions")}
    args = (
        arrays(by.weights, sizes),
        jax.tree.map(lambda spec: array(*one, spec=spec), by.cache),
        rows | {"sequences": array(point.tokens, dtype="int32")},
        {
            "rows": array(sequences, dtype="int32"),
            "temperature": array(sequences, dtype="float32"),
            "seeds": array(sequences, dtype="uint32"),
        },
    )
    if not point.lanes:
        return args
    batch = context.batch(point.tokens, point.lanes)
    banks = {module.name: context.banks(module) for module in plan.modules}
    fields = {"blocks": batch.blocks, "owners": batch.owners, "slots": batch.slots}
    return (*args, banks, fields)
