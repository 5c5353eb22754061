"""The programs that aot-lora brings: kernels and bank writes, by name."""

from __future__ import annotations

from collections.abc import Callable

from aot_lora import kernels
from aot_lora.plan import Variant
from aot_lora.programs.spec import Context, Program


def _shrink(v: Variant, c: Context) -> Program:
    (_, d), (_, layers) = v.dims
    x, bank, batch = c.array(v.tokens, d), c.bank(layers, d), c.batch(v.tokens, v.lanes)
    args = (x, bank, batch.layer, batch.blocks, batch.owners, batch.slots)
    return Program(fn=kernels.lora_shrink, args=args)


def _shrink_single(v: Variant, c: Context) -> Program:
    masked = _shrink(v, c)
    return Program(fn=kernels.lora_shrink_single, args=masked.args[:4])


def _expand(v: Variant, c: Context) -> Program:
    (_, o), (_, layers) = v.dims
    base, h = c.array(v.tokens, o), c.array(v.tokens, v.lanes)
    bank, batch = c.bank(layers, o), c.batch(v.tokens, v.lanes)
    args = (base, h, bank, batch.layer, batch.blocks, batch.slots)
    return Program(fn=kernels.lora_expand, args=args, donate=(0,))


def _expand_single(v: Variant, c: Context) -> Program:
    masked = _expand(v, c)
    return Program(fn=kernels.lora_expand_single, args=masked.args[:5], donate=(0,))


def _bank_write(v: Variant, c: Context) -> Program:
    (_, d), (_, o), (_, layers) = v.dims
    banks = c.bank(layers, d), c.bank(layers, o)
    weights = c.array(layers, v.lanes, d), c.array(layers, o, v.lanes)
    scale, blocks = c.array(layers, dtype="float32"), c.batch(1, v.lanes).blocks
    return Program(fn=kernels.bank_write, args=(*banks, *weights, scale, blocks), donate=(0, 1))


def _bank_reset(v: Variant, c: Context) -> Program:
    (_, d), (_, o), (_, layers) = v.dims
    args = (c.bank(layers, d), c.bank(layers, o), c.batch(1, v.lanes).blocks)
    return Program(fn=kernels.bank_reset, args=args, donate=(0, 1))


BUILDERS: dict[str, Callable[[Variant, Context], Program]] = {
    "lora_shrink": _shrink,
    "lora_shrink_single": _shrink_single,
    "lora_expand": _expand,
    "lora_expand_single": _expand_single,
    "bank_write": _bank_write,
    "bank_reset": _bank_reset,
}
