"""Per-batch metadata, made once on the host and reused by all modules and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from aot_lora.errors import OutOfPlanError
from aot_lora.plan.pad import pad_batch
from aot_lora.runtime.executables import Executables, Kernels

Held = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which adapter each row has, in the plan's buckets.

    Args:
      count: real rows; the rest up to `tokens` is padding.
      tokens: token bucket T.
      lanes: lane bucket L; 0 where no row has an adapter.
      single: whether every row has the same adapter, so that no mask is needed.
      held: the slots in the batch and the blocks that each held when it was made.
      kernels: the executables of each module.
      slots: [T] int32; blocks: [L / quantum] int32; owners: [L / quantum] int32, on the
        device; None where `lanes` is 0.
    """

    count: int
    tokens: int
    lanes: int
    single: bool
    held: Held
    kernels: dict[str, Kernels]
    slots: Any
    blocks: Any
    owners: Any


def make_batch(
    slots: np.ndarray,
    owned: Mapping[int, tuple[int, ...]],
    executables: Executables,
    device: Any,
) -> Batch:
    """Pads a batch's slots and lists the lanes of its adapters.

    Args:
      slots: [tokens] integers, each row's slot or -1.
      owned: the bank blocks of each resident slot.
      executables: for buckets and kernels.
      device: where the arrays go.

    Raises:
      OutOfPlanError: more rows than the budget, a slot that holds no adapter, or more lanes than
        the largest bucket.
    """
    plan = executables.plan
    rows = np.asarray(slots)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OutOfPlanError(
            "slots are not a row of integers",
            expected="[tokens] integers, -1 for no adapter",
            found=f"{rows.dtype}{list(rows.shape)}",
        )
    count = rows.shape[0]
    active = [int(slot) for slot in np.unique(rows) if slot != -1]
    held = _held(active, owned)
    lanes = sum(len(blocks) for _, blocks in held) * plan.quantum
    single = 1 in plan.slots and len(active) == 1 and bool((rows != -1).all())
    route = executables.route(max(count, 1), lanes, single=single)
    on_device = (None, None, None)
    if active:
        arrays = pad_batch(rows, held, tokens=route.tokens, lanes=route.lanes, quantum=plan.quantum)
        on_device = jax.device_put(arrays, device)
    return Batch(
        count=count,
        tokens=route.tokens,
        lanes=route.lanes,
        single=single,
        held=held,
        kernels=route.kernels,
        slots=on_device[0],
        blocks=on_device[1],
        owners=on_device[2],
    )


def check_current(batch: Batch, owned: Mapping[int, tuple[int, ...]]) -> None:
    """Refuses a batch whose slots were written since. A write gives a slot a new tuple of blocks.

    Raises:
      OutOfPlanError: they were.
    """
    for slot, blocks in batch.held:
        if owned.get(slot) is not blocks:
            raise OutOfPlanError(
                f"slot {slot} was written since this batch was made",
                expected="a batch made after the last write to its slots",
                next_step="call batch() again: its blocks may be another adapter's now",
            )


def _held(active: list[int], owned: Mapping[int, tuple[int, ...]]) -> Held:
    found = [(slot, owned.get(slot)) for slot in active]  # one look: a writer may be at work
    held = tuple((slot, blocks) for slot, blocks in found if blocks is not None)
    if len(held) < len(active):
        unknown = [slot for slot, blocks in found if blocks is None]
        raise OutOfPlanError(
            f"slots {unknown} hold no adapter",
            expected=f"-1, or one of {sorted(owned)}",
            found=str(unknown),
            next_step="load the adapter before a batch names its slot",
        )
    return held
