"""The programs that aot-lora brings: kernels and bank writes, by name."""

from __future__ import annotations

from collections.abc import Callable

from aot_lora import kernels
from aot_lora.plan import Variant
from aot_lora.programs.spec import Context, Program


def _shrink(v: Variant, c: Context) -> Program:
    (_, d) = v.dims[0]
    batch = c.batch(v.tokens, v.lanes)
    x, (a_bank, _) = c.array(v.tokens, d), c.banks(d, 1)
    args = (x, a_bank, batch.blocks, batch.owners, batch.slots)
    return Program(fn=kernels.lora_shrink, args=args)


def _shrink_single(v: Variant, c: Context) -> Program:
    (_, d) = v.dims[0]
    x, (a_bank, _) = c.array(v.tokens, d), c.banks(d, 1)
    args = (x, a_bank, c.batch(v.tokens, v.lanes).blocks)
    return Program(fn=kernels.lora_shrink_single, args=args)


def _expand(v: Variant, c: Context) -> Program:
    (_, o) = v.dims[0]
    batch = c.batch(v.tokens, v.lanes)
    base, h, (_, b_bank) = c.array(v.tokens, o), c.array(v.tokens, v.lanes), c.banks(1, o)
    args = (base, h, b_bank, batch.blocks, batch.slots)
    return Program(fn=kernels.lora_expand, args=args, donate=(0,))


def _expand_single(v: Variant, c: Context) -> Program:
    (_, o) = v.dims[0]
    base, h, (_, b_bank) = c.array(v.tokens, o), c.array(v.tokens, v.lanes), c.banks(1, o)
    args = (base, h, b_bank, c.batch(v.tokens, v.lanes).blocks)
    return Program(fn=kernels.lora_expand_single, args=args, donate=(0,))


def _bank_write(v: Variant, c: Context) -> Program:
    (_, d), (_, o) = v.dims
    args = (*c.banks(d, o), c.array(v.lanes, d), c.array(v.lanes, o), c.batch(1, v.lanes).blocks)
    return Program(fn=kernels.bank_write, args=args, donate=(0, 1))


def _bank_reset(v: Variant, c: Context) -> Program:
    (_, d), (_, o) = v.dims
    args = (*c.banks(d, o), c.batch(1, v.lanes).blocks)
    return Program(fn=kernels.bank_reset, args=args, donate=(0, 1))


BUILDERS: dict[str, Callable[[Variant, Context], Program]] = {
    "lora_shrink": _shrink,
    "lora_shrink_single": _shrink_single,
    "lora_expand": _expand,
    "lora_expand_single": _expand_single,
    "bank_write": _bank_write,
    "bank_reset": _bank_reset,
}
