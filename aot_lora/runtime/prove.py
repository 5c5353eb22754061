"""Numeric proof: every stored LoRA executable against the unpadded float32 definition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from aot_lora.adapters import pack_arrays
from aot_lora.adapters.values import DTYPES
from aot_lora.errors import OutOfPlanError
from aot_lora.kernels.reference import lora, tolerance
from aot_lora.plan import Module, Variant
from aot_lora.runtime.batch import Batch
from aot_lora.runtime.runtime import Runtime

Pair = tuple[np.ndarray, np.ndarray]


class Proof(NamedTuple):
    """One run of an executable against its definition.

    Args:
      variant: its name.
      error: norm of the difference over the norm of the result; 1 where a bank is wrong.
      limit: what rounding alone may cause.
    """

    variant: str
    error: float
    limit: float


def prove(runtime: Runtime) -> Iterator[Proof]:
    """Runs the LoRA programs at every point of the plan, on random adapters that fill it.

    The banks are emptied. A user's own programs have no definition to hold them against.
    """
    rng = np.random.default_rng(0)
    plan = runtime.plan
    if not plan.with_lora:
        return
    for lanes in plan.adapter_lanes.buckets:
        yield from _prove_lanes(runtime, lanes, True, rng)
    for lanes in plan.lanes.buckets:
        yield from _prove_lanes(runtime, lanes, False, rng)


def _prove_lanes(
    runtime: Runtime, lanes: int, single: bool, rng: np.random.Generator
) -> Iterator[Proof]:
    plan = runtime.plan
    for slot in list(runtime.banks.owned):
        runtime.banks.reset(slot)
    places = [(m, n) for m in plan.modules for n in sorted({0, m.layers - 1})]
    adapters: dict[int, dict[tuple[str, int], Pair]] = {}
    for slot, rank in enumerate(_ranks(runtime, lanes, single)):
        adapters[slot] = {
            (m.name, layer): (
                _normal(rng, plan.dtype, rank, m.d),
                _normal(rng, plan.dtype, m.o, rank),
            )
            for m, layer in places
        }
        packed = pack_arrays(adapters[slot], plan)
        runtime.banks.put(slot, packed)
        if single:
            yield from _prove_banks(runtime, slot, packed.lanes, adapters[slot])
            runtime.banks.put(slot, packed)
    if single and 1 not in plan.slots:
        return
    # One adapter alone is a batch without a mask, so a masked one needs a row of none beside it.
    needed = len(adapters) + (not single and len(adapters) == 1)
    below = 0
    for tokens in plan.tokens.buckets:
        least, below = max(below + 1, needed), tokens
        if least > tokens:
            continue  # no batch ever gets here
        count = int(rng.integers(least, tokens + 1))
        slots = np.arange(count) % (len(adapters) if single else len(adapters) + 1)
        slots[slots == len(adapters)] = -1
        batch = runtime.batch(slots)
        if (batch.tokens, batch.lanes, batch.single) != (tokens, lanes, single):
            raise OutOfPlanError(
                f"the point of {tokens} tokens and {lanes} lanes was not reached",
                found=f"{batch.tokens} tokens and {batch.lanes} lanes",
            )
        for module, layer in places:
            own = {slot: pairs[module.name, layer] for slot, pairs in adapters.items()}
            yield from _prove_kernels(runtime, module, layer, batch, slots, own, rng)


def _prove_kernels(
    runtime: Runtime,
    module: Module,
    layer: int,
    batch: Batch,
    slots: np.ndarray,
    adapters: dict[int, Pair],
    rng: np.random.Generator,
) -> Iterator[Proof]:
    """Both kernels at once: the pair's error counts for each of them."""
    dtype = runtime.plan.dtype
    x, base = (_normal(rng, dtype, len(slots), width) for width in (module.d, module.o))
    found = runtime.apply(module.name, x, batch, base, layer=layer).numpy().astype(np.float32)
    expected = lora(x, base, {slot: (a, b.T) for slot, (a, b) in adapters.items()}, slots)
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not np.array_equal(found[slots == -1], base[slots == -1].astype(np.float32)):
        error = 1.0  # a row without an adapter is the base, bit for bit
    limit = tolerance(dtype, reduction=max(module.d, batch.lanes))
    suffix = "_single" if batch.single else ""
    for program, letter in (("lora_shrink", "d"), ("lora_expand", "o")):
        dims = runtime.plan.dims(module, letter)
        variant = Variant(program + suffix, batch.tokens, batch.lanes, dims)
        yield Proof(variant.name, error, limit)


def _prove_banks(
    runtime: Runtime, slot: int, lanes: int, weights: dict[tuple[str, int], Pair]
) -> Iterator[Proof]:
    """What was written is there, bit for bit; after a reset nothing is."""
    blocks = list(runtime.banks.owned[slot])
    for program in ("bank_write", "bank_reset"):
        if program == "bank_reset":
            runtime.banks.reset(slot)
        for module in runtime.plan.modules:
            banks = [np.asarray(bank)[:, blocks] for bank in runtime.banks.arrays[module.name]]
            right = True
            for layer in range(module.layers):
                a, b = (bank[layer].reshape(-1, bank.shape[-1]) for bank in banks)
                pair = weights.get((module.name, layer)) if program == "bank_write" else None
                wanted = (pair[0], pair[1].T) if pair else (a[:0], b[:0])
                for lane, want in zip((a, b), wanted, strict=True):
                    rank = len(want)
                    right &= np.array_equal(lane[:rank], want) and not lane[rank:].any()
            dims = runtime.plan.dims(module, "do")
            variant = Variant(program=program, lanes=lanes, dims=dims)
            yield Proof(variant.name, 0.0 if right else 1.0, 0.0)


def _ranks(runtime: Runtime, lanes: int, single: bool) -> list[int]:
    """Ranks whose lanes together are just `lanes`; one lane short where that fills a block too."""
    plan = runtime.plan
    short = 1 if plan.quantum > 1 else 0
    if single:
        return [lanes - short]
    found: list[int] = []
    while lanes:
        largest = max(bucket for bucket in plan.adapter_lanes.buckets if bucket <= lanes)
        found.append(largest - short)
        lanes -= largest
    return found


def _normal(rng: np.random.Generator, dtype: str, *shape: int) -> np.ndarray:
    values = rng.standard_normal(shape, np.float32) / np.float32(shape[-1] ** 0.5)
    return values.astype(DTYPES[dtype])
