"""The decoder's steps as programs of a plan: their arguments at each point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec

from aot_lora.decoder.lora import LoraMaker, masked_lora
from aot_lora.decoder.model import Tree, step
from aot_lora.decoder.sharding import specs
from aot_lora.decoder.weights import decoder_of, shapes
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
    lora: LoraMaker = masked_lora,
) -> Program:
    """A step of a point, with adapters where it has lanes.

    Its function takes (weights, cache, rows, sampling), and where there are lanes also (banks by
    module, batch), the batch being ``blocks`` and ``owners`` [L / quantum] and ``slots`` [T].

    Args:
      point, context: as a user's function gets them.
      decode_rows: rows at the front that are each of a sequence of their own.
      prefill: whether the rows after them are run.
      lora: makes the function that adds adapters.

    Raises:
      ProgramError: the plan has no decoder or no cache.
    """
    plan = context.plan
    shape, _ = decoder_of(plan)
    by = specs(plan, tp=context.target.devices)
    axis = AXIS if context.mesh else None
    used = point.tokens if prefill else decode_rows

    def base_step(weights: Tree, cache: Tree, rows: Tree, sampling: Tree) -> Any:
        rows = {name: array[:used] for name, array in rows.items()}
        return step(shape, weights, cache, rows, sampling, decode_rows=decode_rows, axis=axis)

    def lora_step(
        weights: Tree, cache: Tree, rows: Tree, sampling: Tree, banks: Any, batch: Tree
    ) -> Any:
        rows = {name: array[:used] for name, array in rows.items()}
        slots = batch["slots"][:used]
        return step(
            shape,
            weights,
            cache,
            rows,
            sampling,
            decode_rows=decode_rows,
            lora=lora(banks, batch, slots),
            head_lora=lora(banks, batch, slots[sampling["rows"]]),
            axis=axis,
        )

    fn: Callable[..., Any] = lora_step if point.lanes else base_step
    if context.mesh:
        whole = PartitionSpec()
        arguments = (by.weights, by.cache, whole, whole)
        arguments += (by.banks, whole) if point.lanes else ()
        fn = jax.shard_map(fn, mesh=context.mesh, in_specs=arguments, out_specs=(whole, by.cache))
    return Program(fn=fn, args=step_args(point, context), donate=(1,))


def step_args(point: Point, context: Context) -> tuple[Any, ...]:
    """The abstract arguments of a step, in its order."""
    plan, array = context.plan, context.array
    shape, cache = decoder_of(plan)
    sequences, by = cache.sequences, specs(plan, tp=context.target.devices)
    entries = {
        name: array(plan.layers, sequences, cache.length, shape.kv_heads, shape.head_dim, spec=spec)
        for name, spec in by.cache.items()
    }
    rows = {name: array(point.tokens, dtype="int32") for name in ("tokens", "positions")}
    args = (
        jax.tree.map(lambda spec, sizes: array(*sizes, spec=spec), by.weights, shapes(plan)),
        entries,
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
