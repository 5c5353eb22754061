"""Per-batch metadata, made once on the host and reused by all modules and layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from aot_lora.errors import OutOfPlanError
from aot_lora.plan import Plan

_NOBODY = -2  # owns padding blocks: no row has it as its slot.


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Which adapter each row has, in the plan's buckets.

    Args:
      count: real rows; the rest up to `tokens` is padding.
      tokens: token bucket T.
      lanes: lane bucket L; 0 where no row has an adapter.
      single: whether every row has the same adapter, so that no mask is needed.
      held: the slots in the batch and the blocks that each held when it was made.
      slots: [T] int32; blocks: [L / quantum] int32; owners: [L / quantum] int32, on the
        device; None where `lanes` is 0.
    """

    count: int
    tokens: int
    lanes: int
    single: bool
    held: tuple[tuple[int, tuple[int, ...]], ...]
    slots: Any
    blocks: Any
    owners: Any


def make_batch(
    slots: np.ndarray, owned: Mapping[int, tuple[int, ...]], plan: Plan, device: Any
) -> Batch:
    """Pads a batch's slots and lists the lanes of its adapters.

    Args:
      slots: [tokens] integers, each row's slot or -1.
      owned: the bank blocks of each resident slot.
      plan: for buckets and quantum.
      device: where the arrays go.

    Raises:
      OutOfPlanError: more rows than the budget, a slot that holds no adapter, or more lanes than
        the largest bucket.
    """
    rows = np.asarray(slots)
    if rows.ndim != 1 or (rows.size and not np.issubdtype(rows.dtype, np.integer)):
        raise OutOfPlanError(
            "slots are not a row of integers",
            expected="[tokens] integers, -1 for no adapter",
            found=f"{rows.dtype}{list(rows.shape)}",
        )
    count = rows.shape[0]
    tokens = plan.tokens.bucket(max(count, 1))
    active = [int(slot) for slot in np.unique(rows) if slot != -1]
    unknown = [slot for slot in active if slot not in owned]
    if unknown:
        raise OutOfPlanError(
            f"slots {unknown} hold no adapter",
            expected=f"-1, or one of {sorted(owned)}",
            found=str(unknown),
            next_step="load the adapter before a batch names its slot",
        )
    if not active:
        return Batch(
            count=count,
            tokens=tokens,
            lanes=0,
            single=False,
            held=(),
            slots=None,
            blocks=None,
            owners=None,
        )
    held = tuple((slot, owned[slot]) for slot in active)
    blocks = [block for _, theirs in held for block in theirs]
    owners = [slot for slot, theirs in held for _ in theirs]
    single = 1 in plan.slots and len(active) == 1 and bool((rows != -1).all())
    axis = plan.adapter_lanes if single else plan.lanes
    lanes = axis.bucket(len(blocks) * plan.quantum)
    padding = lanes // plan.quantum - len(blocks)
    arrays = (
        np.concatenate([rows, np.full(tokens - count, -1)]).astype(np.int32),
        np.array(blocks + [0] * padding, np.int32),
        np.array(owners + [_NOBODY] * padding, np.int32),
    )
    on_device = jax.device_put(arrays, device)
    return Batch(
        count=count,
        tokens=tokens,
        lanes=lanes,
        single=single,
        held=held,
        slots=on_device[0],
        blocks=on_device[1],
        owners=on_device[2],
    )
