"""The programs that aot-lora brings: kernels and bank writes, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jax.sharding import PartitionSpec

from aot_lora import kernels
from aot_lora.plan import Variant
from aot_lora.programs.mesh import Specs, specs
from aot_lora.programs.spec import Context, Program


def _specs(v: Variant) -> Specs:
    return specs("d" if "row" in dict(v.dims) else "o")


def _shrink(v: Variant, c: Context) -> Program:
    size, by = dict(v.dims), _specs(v)
    x, batch = c.array(v.tokens, size["d"], spec=by.x), c.batch(v.tokens, v.lanes)
    bank = c.bank(size["n"], size["d"], spec=by.a_bank)
    args = (x, bank, batch.layer, batch.blocks, batch.owners, batch.slots)
    return Program(fn=kernels.lora_shrink, args=args, out_shardings=c.sharding(PartitionSpec()))


def _shrink_single(v: Variant, c: Context) -> Program:
    masked = _shrink(v, c)
    return replace(masked, fn=kernels.lora_shrink_single, args=masked.args[:4])


def _expand(v: Variant, c: Context) -> Program:
    size, by = dict(v.dims), _specs(v)
    base, h = c.array(v.tokens, size["o"], spec=by.base), c.array(v.tokens, v.lanes)
    bank, batch = c.bank(size["n"], size["o"], spec=by.b_bank), c.batch(v.tokens, v.lanes)
    args = (base, h, bank, batch.layer, batch.blocks, batch.slots)
    out = c.sharding(by.base)
    return Program(fn=kernels.lora_expand, args=args, donate=(0,), out_shardings=out)


def _expand_single(v: Variant, c: Context) -> Program:
    masked = _expand(v, c)
    return replace(masked, fn=kernels.lora_expand_single, args=masked.args[:5])


def _bank_write(v: Variant, c: Context) -> Program:
    size, by = dict(v.dims), _specs(v)
    a = c.array(size["n"], v.lanes, size["d"], spec=by.a)
    b = c.array(size["n"], size["o"], v.lanes, spec=by.b)
    scale = c.array(size["n"], dtype="float32")
    reset = _bank_reset(v, c)
    *banks, blocks = reset.args
    return replace(reset, fn=kernels.bank_write, args=(*banks, a, b, scale, blocks))


def _bank_reset(v: Variant, c: Context) -> Program:
    size, by = dict(v.dims), _specs(v)
    a_bank = c.bank(size["n"], size["d"], spec=by.a_bank)
    b_bank = c.bank(size["n"], size["o"], spec=by.b_bank)
    return Program(
        fn=kernels.bank_reset,
        args=(a_bank, b_bank, c.batch(1, v.lanes).blocks),
        donate=(0, 1),
        out_shardings=c.mesh and (c.sharding(by.a_bank), c.sharding(by.b_bank)),
    )


BUILDERS: dict[str, Callable[[Variant, Context], Program]] = {
    "lora_shrink": _shrink,
    "lora_shrink_single": _shrink_single,
    "lora_expand": _expand,
    "lora_expand_single": _expand_single,
    "bank_write": _bank_write,
    "bank_reset": _bank_reset,
}
