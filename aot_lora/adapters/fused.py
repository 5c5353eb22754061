"""Fused projections: what they consist of, split into and joined from their parts.

Llama's and Phi's order, which vLLM uses as well: the rows of q, then k, then v; of gate, then up.
"""

from __future__ import annotations

from dataclasses import dataclass

from aot_lora.adapters.naming import listed, shown
from aot_lora.adapters.values import Pair
from aot_lora.errors import AdapterError
from aot_lora.plan import Module

_FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
_WHOLE = {part: whole for whole, parts in _FUSED.items() for part in parts}

QKV = frozenset((*_FUSED["qkv_proj"], "qkv_proj"))

# Fused as well, but per head or per group of heads in some models: splitting would be a guess.
UNKNOWN_LAYOUTS = frozenset(
    ("query_key_value", "W_pack", "c_attn", "attn_qkv", "Wqkv", "wqkv", "in_proj", "qkv")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A pair's share in one layer of one module of the plan.

    Args:
      pair: where A and B come from.
      first_row, rows: the rows of B that are taken.
      out: the first of the module's O rows that they become.
      lane: the first lane that the pair's rank takes.
    """

    pair: Pair
    first_row: int
    rows: int
    out: int = 0
    lane: int = 0


def parts_of(name: str) -> tuple[str, ...]:
    """What a fused module consists of, in the order of its rows; empty if it is not fused."""
    return _FUSED.get(name, ())


def whole_of(name: str) -> str | None:
    """The fused module that a module is a part of."""
    return _WHOLE.get(name)


def split(pair: Pair, module: Module, modules: dict[str, Module], *, where: str) -> Part:
    """The rows of a fused pair that are `module`'s.

    Raises:
      AdapterError: the parts' rows do not add up to the pair's.
    """
    parts = [modules[name] for name in parts_of(pair.module)]
    total = sum(part.o for part in parts)
    if pair.b.shape[0] != total:
        sizes = " + ".join(f"{part.name} {part.o}" for part in parts)
        raise AdapterError(
            f"B of `{shown(pair.path)}` cannot be split",
            where=where,
            expected=f"{total} rows: {sizes}",
            found=f"{pair.b.shape[0]} rows",
            next_step="check that the adapter and the config are for the same model",
        )
    before = parts[: parts.index(module)]
    return Part(pair=pair, first_row=sum(part.o for part in before), rows=module.o)


def joined(pairs: tuple[Pair, ...], module: Module, *, where: str) -> tuple[Part, ...]:
    """Where each pair's rows and lanes go in a fused module. An absent part gets nothing.

    Raises:
      AdapterError: the parts' rows cannot make up the module's.
    """
    rows = {pair.module: pair.b.shape[0] for pair in pairs}
    sizes = _sizes(rows, module)
    if sizes is None:
        raise AdapterError(
            f"{listed(pair.path for pair in pairs)} cannot be joined into `{module.name}`",
            where=where,
            expected=f"{module.o} rows, "
            + ("k and v alike" if module.name == "qkv_proj" else "gate and up alike"),
            found=", ".join(f"{name} {count}" for name, count in rows.items()),
            next_step="check that the adapter and the config are for the same model",
        )
    by_name = {pair.module: pair for pair in pairs}
    parts: list[Part] = []
    out = lane = 0
    for name in parts_of(module.name):
        pair = by_name.get(name)
        if pair is not None:
            parts.append(Part(pair=pair, first_row=0, rows=sizes[name], out=out, lane=lane))
            lane += pair.rank
        out += sizes[name]
    return tuple(parts)


def _sizes(rows: dict[str, int], module: Module) -> dict[str, int] | None:
    """Rows of every part, from those that are known; k and v, and gate and up, are alike."""
    if module.name == "gate_up_proj":
        first = twin = module.o // 2
    elif "k_proj" in rows or "v_proj" in rows:
        twin = rows.get("k_proj", rows.get("v_proj", 0))
        first = module.o - 2 * twin
    else:
        first = rows["q_proj"]
        twin = (module.o - first) // 2
    parts = parts_of(module.name)
    sizes = dict(zip(parts, (first, twin, twin)[: len(parts)], strict=True))
    fits = sum(sizes.values()) == module.o and min(sizes.values()) > 0
    return sizes if fits and all(sizes[name] == count for name, count in rows.items()) else None
