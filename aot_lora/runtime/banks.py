"""Banks: the device arrays that hold the loaded adapters' weights, written in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from aot_lora.errors import OutOfPlanError
from aot_lora.plan import Module, Plan, Variant, round_up

Weights = Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]


class Banks:
    """The A and B banks of every module of every layer, and who owns which blocks.

    Writes take over the buffers that reads use: the caller keeps `put` and `reset` apart from
    `Runtime.apply` and from steps that take `arrays`.

    Args:
      plan: sizes and buckets.
      programs: `bank_write` and `bank_reset`, looked up by variant.
      device: where the banks live.
    """

    def __init__(self, plan: Plan, programs: Callable[[Variant], Any], device: Any) -> None:
        self._plan = plan
        self._programs = programs
        self._device = device
        self._modules = {module.name: module for module in plan.modules}
        self._free = list(range(plan.bank_blocks - 1, 0, -1))  # block 0 stays zero
        self.owned: dict[int, tuple[int, ...]] = {}
        self.arrays: dict[tuple[str, int], tuple[jax.Array, jax.Array]] = {
            (module.name, layer): self._zeros(module)
            for module in (plan.modules if plan.with_lora else ())
            for layer in range(plan.layers)
        }

    def _zeros(self, module: Module) -> tuple[jax.Array, jax.Array]:
        blocks, quantum, dtype = self._plan.bank_blocks, self._plan.quantum, self._plan.dtype
        a, b = (
            np.zeros((blocks, quantum, width), jax.numpy.dtype(dtype))
            for width in (module.d, module.o)
        )
        return jax.device_put((a, b), self._device)

    def put(self, slot: int, weights: Weights) -> None:
        """Puts an adapter into a slot, in place of what was there.

        Modules that `weights` does not name contribute nothing.

        Args:
          slot: 0 up to `max_adapters` - 1.
          weights: (module, layer) -> (A [r, D], B [r, O], pre-transposed and scaled), in the
            plan's dtype; ranks may differ.

        Raises:
          OutOfPlanError: slot, module, layer, rank, shape or dtype outside the plan, or too few
            free lanes. Nothing has changed then.
        """
        plan = self._plan
        if not 0 <= slot < plan.max_adapters:
            raise OutOfPlanError(
                f"slot {slot} is outside the plan", expected=f"0 to {plan.max_adapters - 1}"
            )
        rank = max((self._rank(key, *pair) for key, pair in weights.items()), default=0)
        if not rank:
            raise OutOfPlanError(
                f"an adapter without weights for slot {slot}",
                expected="at least one module",
                next_step="use reset() to empty a slot",
            )
        lanes = plan.adapter_lanes.bucket(rank)
        needed = round_up(rank, plan.quantum) // plan.quantum
        held = self.owned.get(slot, ())
        if needed > len(self._free) + len(held):
            raise OutOfPlanError(
                "the banks are full",
                expected=f"at most {(len(self._free) + len(held)) * plan.quantum} lanes",
                found=f"rank {rank}",
                next_step="unload an adapter, or raise lora.resident_lanes and warm up",
            )
        self.reset(slot)
        blocks = self.owned[slot] = tuple(self._free.pop() for _ in range(needed))
        indices = self._indices(blocks, lanes)
        for key, (a, b) in weights.items():
            program = self._programs(self._variant("bank_write", key[0], lanes))
            padded = jax.device_put((_pad(a, lanes), _pad(b, lanes)), self._device)
            self.arrays[key] = program(*self.arrays[key], *padded, indices)

    def reset(self, slot: int) -> None:
        """Empties a slot: its lanes are zeroed and free again. An empty slot stays empty."""
        blocks = self.owned.pop(slot, ())
        if not blocks:
            return
        lanes = self._plan.adapter_lanes.bucket(len(blocks) * self._plan.quantum)
        indices = self._indices(blocks, lanes)
        for key, banks in self.arrays.items():
            program = self._programs(self._variant("bank_reset", key[0], lanes))
            self.arrays[key] = program(*banks, indices)
        self._free.extend(reversed(blocks))

    def _rank(self, key: tuple[str, int], a: np.ndarray, b: np.ndarray) -> int:
        name, layer = key
        module = self._modules.get(name)
        if module is None or not 0 <= layer < self._plan.layers:
            raise OutOfPlanError(
                f"no bank for {name} of layer {layer}",
                expected=f"{', '.join(self._modules)}; layers 0 to {self._plan.layers - 1}",
            )
        rank = a.shape[0] if a.ndim == 2 else 0
        if a.shape != (rank, module.d) or b.shape != (rank, module.o):
            raise OutOfPlanError(
                f"weights of {name} of layer {layer} have the wrong shape",
                expected=f"A [r, {module.d}] and B [r, {module.o}]",
                found=f"A {list(a.shape)} and B {list(b.shape)}",
            )
        if {a.dtype.name, b.dtype.name} != {self._plan.dtype}:
            raise OutOfPlanError(
                f"weights of {name} of layer {layer} have the wrong dtype",
                expected=self._plan.dtype,
                found=f"A {a.dtype}, B {b.dtype}",
                next_step="cast them once, in numpy",
            )
        if not (np.isfinite(a).all() and np.isfinite(b).all()):
            raise OutOfPlanError(
                f"weights of {name} of layer {layer} are not all finite",
                expected="no NaN and no infinity: one would reach other adapters' rows",
                next_step="check how the adapter was trained or converted",
            )
        if rank > self._plan.adapter_lanes.buckets[-1]:
            raise OutOfPlanError(
                f"rank {rank} of {name} of layer {layer} is outside the plan",
                expected=f"at most {self._plan.adapter_lanes.buckets[-1]}",
                found=str(rank),
                next_step="raise lora.ranks and run warmup",
            )
        return rank

    def _variant(self, program: str, module: str, lanes: int) -> Variant:
        shape = self._modules[module]
        return Variant(program=program, lanes=lanes, dims=(("d", shape.d), ("o", shape.o)))

    def _indices(self, blocks: tuple[int, ...], lanes: int) -> jax.Array:
        indices = np.zeros(lanes // self._plan.quantum, np.int32)
        indices[: len(blocks)] = blocks
        return jax.device_put(indices, self._device)


def _pad(lanes: np.ndarray, count: int) -> np.ndarray:
    padded = np.zeros((count, lanes.shape[1]), lanes.dtype)
    padded[: lanes.shape[0]] = lanes
    return padded
