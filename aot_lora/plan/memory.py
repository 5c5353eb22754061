"""What a plan needs of each device's memory: sums over what single executables need. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from aot_lora.plan.decoder import HEAD_MODULE
from aot_lora.plan.plan import DTYPE_BYTES, Plan
from aot_lora.plan.variants import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one executable needs of each device, in bytes, by the compiler's own analysis.

    Args:
      variant: which.
      weights, banks, cache: those of its arguments, as divided over the devices.
      others: its other arguments, and what the device pads arguments by.
      outputs: results that take over no argument's buffer.
      temporaries: what it needs while it runs.
      code: the executable itself, while it is loaded.
      refused: what the compiler said when it did not fit; then the last four are 0.
      device: the device's memory as its driver says it; 0 where it does not.
    """

    variant: Variant
    weights: int
    banks: int
    cache: int
    others: int = 0
    outputs: int = 0
    temporaries: int = 0
    code: int = 0
    refused: str = ""
    device: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What a server needs of each device, in bytes.

    Args:
      weights, banks, cache: held for good.
      others, outputs, temporaries: the most that any measured executable needs of each.
      code: of all executables of the plan; of each program the largest measured one times its
        variants, so an upper estimate.
      measured: names of the variants that were compiled for it.
      refused: what the compiler said of the first that did not fit; then figures are missing.
    """

    weights: int
    banks: int
    cache: int
    others: int
    outputs: int
    temporaries: int
    code: int
    measured: tuple[str, ...]
    refused: str = ""

    @property
    def total(self) -> int:
        """All of it: as if the largest figures of several executables came together."""
        held = self.weights + self.banks + self.cache + self.code
        return held + self.others + self.outputs + self.temporaries


def largest_variants(plan: Plan) -> tuple[Variant, ...]:
    """The variants to measure: of each program the one with most tokens, lanes and width.

    A program that has points without adapters has its largest one of these measured as well: it
    is another program, and may need more temporaries.
    """
    found: dict[tuple[str, bool], Variant] = {}
    for variant in plan.variants:
        key = variant.program, variant.lanes > 0
        found[key] = max(found.get(key, variant), variant, key=_extent)
    return tuple(found.values())


def _extent(variant: Variant) -> tuple[int, int, int]:
    width = sum(size for letter, size in variant.dims if letter in ("d", "o"))
    return variant.tokens, variant.lanes, width


def add_up(plan: Plan, measured: Sequence[Measured]) -> Memory:
    """What a server of a plan needs.

    Args:
      plan: the plan.
      measured: its `largest_variants`.
    """

    def most(name: str) -> int:
        return max((getattr(one, name) for one in measured), default=0)

    kinds = Counter((variant.program, variant.lanes > 0) for variant in plan.variants)
    code = sum(kinds[one.variant.program, one.variant.lanes > 0] * one.code for one in measured)
    return Memory(
        weights=most("weights"),
        banks=max(plan.bank_bytes, most("banks")),
        cache=most("cache"),
        others=most("others"),
        outputs=most("outputs"),
        temporaries=most("temporaries"),
        code=code,
        measured=tuple(one.variant.name for one in measured),
        refused=next((one.refused for one in measured if one.refused), ""),
    )


def declared(plan: Plan) -> Memory:
    """What a config says by itself, before anything is compiled; the figures of a compiler are 0.

    Banks and cache are exact. Weights are those of a decoder, or of the modules that have banks: a
    server's own model has more of them.
    """
    shape = plan.decoder
    divided, whole = sum(module.d * module.o * module.layers for module in plan.modules), 0
    if shape:
        matrices = shape.modules()
        head = math.prod(matrices.pop(HEAD_MODULE)) * (1 if shape.tied else 2)  # and the embedding
        divided = plan.layers * sum(d * o for d, o in matrices.values()) + head
        whole = (2 * plan.layers + 1) * shape.hidden  # norms
    return Memory(
        weights=(divided // plan.tp + whole) * DTYPE_BYTES[plan.dtype],
        banks=plan.bank_bytes,
        cache=cache_bytes(plan, length=plan.cache.length) if plan.cache else 0,
        others=0,
        outputs=0,
        temporaries=0,
        code=0,
        measured=(),
    )


def cache_bytes(plan: Plan, *, length: int) -> int:
    """The cache of keys and values on each device, in bytes, for sequences of `length` tokens."""
    shape, cache = plan.decoder, plan.cache
    assert shape is not None
    assert cache is not None
    token = 2 * plan.layers * shape.kv_heads * shape.head_dim * DTYPE_BYTES[plan.dtype]
    return token * cache.sequences * length // plan.tp
