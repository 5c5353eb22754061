"""From axes and modules to the ordered, de-duplicated variants. Pure data."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from aot_lora.errors import OutOfPlanError
from aot_lora.plan.axes import Axis
from aot_lora.plan.decoder import DecoderShape, KvCache
from aot_lora.plan.variants import Dims, Module, UserEntry, Variant

WideAxis = Literal["tokens", "lanes"]
"""An axis to which a server may add buckets."""

LORA_PROGRAMS = (
    "lora_shrink",
    "lora_shrink_single",
    "lora_expand",
    "lora_expand_single",
    "bank_write",
    "bank_reset",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The variants of a config and the sizes they share.

    Args:
      tokens: the tokens axis; its last bucket is the token budget.
      slots: slot buckets; 0 is a batch without adapters.
      ranks: rank buckets.
      lanes: the folded axis: each slots x rank in whole quanta, without zero.
      adapter_lanes: lane buckets of one adapter: the ranks in whole quanta.
      modules: projections with banks.
      tp: tensor parallelism: over so many devices each program is divided.
      layers: how many layers hold such modules.
      dtype: of weights, activations and banks.
      quantum: lanes per bank block; an adapter owns whole blocks.
      bank_blocks: blocks in each bank, block 0 (always zero) included.
      max_adapters: slots that may be resident.
      user: the user's own programs.
      decoder, cache: sizes for decoder steps; None where the config has no ``kv_cache``.
      variants: every executable, in the order they are compiled.
    """

    tokens: Axis
    slots: tuple[int, ...]
    ranks: tuple[int, ...]
    lanes: Axis
    adapter_lanes: Axis
    modules: tuple[Module, ...]
    tp: int
    layers: int
    dtype: str
    quantum: int
    bank_blocks: int
    max_adapters: int
    with_lora: bool
    user: tuple[UserEntry, ...]
    decoder: DecoderShape | None = None
    cache: KvCache | None = None
    variants: tuple[Variant, ...] = ()

    @property
    def points(self) -> int:
        """How many points the grid has: one bucket of each axis."""
        return len(self.tokens.buckets) * len(self.slots) * len(self.ranks)

    @property
    def step_share(self) -> float:
        """Part of the variants, 0 to 1, that are no LoRA programs but steps of a model."""
        steps = sum(variant.program not in LORA_PROGRAMS for variant in self.variants)
        return steps / max(len(self.variants), 1)

    @property
    def bank_bytes(self) -> int:
        """Memory of all banks of all layers on each device, in bytes."""
        lanes = self.bank_blocks * self.quantum
        width = sum(module.layers * sum(self.widths(module)) for module in self.modules)
        return lanes * width * DTYPE_BYTES[self.dtype] if self.with_lora else 0

    @property
    def with_lanes(self) -> bool:
        """Whether any batch may have adapters."""
        return any(self.slots)

    @property
    def most_blocks(self) -> int:
        """Bank blocks of the largest adapter there may be."""
        return self.adapter_lanes.buckets[-1] // self.quantum

    def lanes_of(self, slots: int, rank: int | None = None) -> int:
        """Lanes of so many adapters.

        Args:
          slots: adapters in a batch.
          rank: the largest rank among them; the plan's largest unless given.

        Raises:
          OutOfPlanError: fewer than none, or a rank above the plan's.
        """
        if slots < 0 or (rank is not None and rank < 1):
            raise OutOfPlanError(
                "slots or rank out of range",
                expected="slots of 0 or more, rank of 1 or more",
                found=f"slots={slots}, rank={rank}",
            )
        one = self.adapter_lanes
        return slots * (one.buckets[-1] if rank is None else one.bucket(rank))

    def widths(self, module: Module) -> tuple[int, int]:
        """Widths (D, O) of a module's banks on each device."""
        by_d, by_o = (self.tp, 1) if module.split == "d" else (1, self.tp)
        return module.d // by_d, module.o // by_o

    def dims(self, module: Module, letters: str) -> Dims:
        """The static sizes of a variant for a module: `letters` of d and o, layers, the mesh."""
        sizes = {"d": module.d, "o": module.o}
        mesh = (("row" if module.split == "d" else "col", self.tp),) if self.tp > 1 else ()
        return (*((letter, sizes[letter]) for letter in letters), ("n", module.layers), *mesh)

    def digest(self) -> str:
        """SHA-256 of everything the plan says; equal plans have equal digests."""
        return hashlib.sha256(repr(self).encode()).hexdigest()  # names every field, nested ones too


DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def round_up(value: int, quantum: int) -> int:
    """The smallest multiple of `quantum` that is at least `value`."""
    return -(-value // quantum) * quantum


def lane_buckets(
    slots: tuple[int, ...], ranks: tuple[int, ...], quantum: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lanes of batches (none for those without adapters), and lanes of one adapter."""
    of_one = sorted({round_up(rank, quantum) for rank in ranks})
    folded = {lanes * count for count in slots for lanes in of_one} - {0}
    return tuple(sorted(folded)), tuple(of_one)


def build_plan(
    *,
    token_buckets: tuple[int, ...],
    slots: tuple[int, ...],
    ranks: tuple[int, ...],
    modules: tuple[Module, ...],
    tp: int = 1,
    layers: int,
    dtype: str,
    quantum: int,
    max_adapters: int,
    resident_lanes: int,
    with_lora: bool,
    user: tuple[UserEntry, ...],
    decoder: DecoderShape | None = None,
    cache: KvCache | None = None,
) -> Plan:
    """Folds the grid of points into distinct variants.

    A point of slots x rank needs that many lanes, so (8, 16), (4, 32) and (2, 64) share their
    executables; modules of one width share theirs.
    """
    folded, of_one = lane_buckets(slots, ranks, quantum)
    lanes = Axis(name="lanes", buckets=folded) if folded else None
    adapter_lanes = Axis(name="lanes", buckets=of_one)
    plan = Plan(
        tokens=Axis(name="tokens", buckets=token_buckets),
        slots=slots,
        ranks=ranks,
        lanes=lanes or adapter_lanes,
        adapter_lanes=adapter_lanes,
        modules=modules,
        tp=tp,
        layers=layers,
        dtype=dtype,
        quantum=quantum,
        bank_blocks=1 + resident_lanes // quantum,
        max_adapters=max_adapters,
        with_lora=with_lora and lanes is not None,
        user=user,
        decoder=decoder,
        cache=cache,
    )
    return replace(plan, variants=tuple(dict.fromkeys(_enumerate(plan))))


def widen(plan: Plan, buckets: Mapping[WideAxis, Sequence[int]]) -> Plan:
    """A plan with further buckets on its axes ``tokens`` and ``lanes``.

    Args:
      plan: any plan.
      buckets: by axis; an axis without any stays as it is.
    """
    tokens, lanes = (
        Axis(name=name, buckets=tuple(sorted({*axis.buckets, *buckets.get(name, ())})))
        for name, axis in _wide_axes(plan).items()
    )
    wide = replace(plan, tokens=tokens, lanes=lanes)
    return replace(wide, variants=tuple(dict.fromkeys(_enumerate(wide))))


def _wide_axes(plan: Plan) -> dict[WideAxis, Axis]:
    return {"tokens": plan.tokens, "lanes": plan.lanes}


def _enumerate(plan: Plan) -> Iterator[Variant]:
    if plan.with_lora:
        yield from _lora_variants(plan)
    for entry in plan.user:
        for tokens in plan.tokens.buckets:
            if entry.max_tokens is not None and tokens > entry.max_tokens:
                break
            if 0 in plan.slots:
                yield Variant(program=entry.name, tokens=tokens)
            if plan.with_lanes:
                for lanes in plan.lanes.buckets:
                    yield Variant(program=entry.name, tokens=tokens, lanes=lanes)


def _lora_variants(plan: Plan) -> Iterator[Variant]:
    kernels = [
        (program, dims)
        for program, letter in (("lora_shrink", "d"), ("lora_expand", "o"))
        for dims in sorted({plan.dims(module, letter) for module in plan.modules})
    ]
    # Without 1 among the slots nobody asked for maskless programs: one adapter is a masked batch.
    families = [("", plan.lanes), ("_single", plan.adapter_lanes)][: 2 if 1 in plan.slots else 1]
    for suffix, axis in families:
        for tokens in plan.tokens.buckets:
            for lanes in axis.buckets:
                for program, dims in kernels:
                    yield Variant(program + suffix, tokens, lanes, dims)
    for dims in sorted({plan.dims(module, "do") for module in plan.modules}):
        for lanes in plan.adapter_lanes.buckets:
            for program in ("bank_write", "bank_reset"):
                yield Variant(program=program, lanes=lanes, dims=dims)
