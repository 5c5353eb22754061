"""Banks: the device arrays that hold the loaded adapters' weights, written in place."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from aot_lora.adapters import Packed, PackedModule
from aot_lora.errors import CapacityError, OutOfPlanError
from aot_lora.plan import Module, Plan, Variant, round_up
from aot_lora.programs.mesh import specs
from aot_lora.runtime.gate import Gate
from aot_lora.runtime.places import Places

BankArrays = dict[str, tuple[jax.Array, jax.Array]]


class Banks:
    """The A and B banks of every module, and who owns which blocks.

    Writes take over the buffers that reads use. So one writer and any number of readers may work
    at once: `Runtime.apply` and `reading` keep their dispatch apart from the writer's. A slot that
    is being written belongs to nobody until all of it is.

    Args:
      plan: sizes and buckets.
      programs: `bank_write` and `bank_reset`, looked up by variant.
      places: where the banks live.
    """

    def __init__(self, plan: Plan, programs: Callable[[Variant], Any], places: Places) -> None:
        self._plan = plan
        self._programs = programs
        self._places = places
        self._modules = {module.name: module for module in plan.modules}
        # Any free block serves any adapter: there is nothing to compact.
        self._free = list(range(plan.bank_blocks - 1, 0, -1))  # block 0 stays zero
        self.gate = Gate()
        self.owned: dict[int, tuple[int, ...]] = {}
        self.arrays: BankArrays = {
            module.name: self._zeros(module) for module in (plan.modules if plan.with_lora else ())
        }

    def _zeros(self, module: Module) -> tuple[jax.Array, jax.Array]:
        plan, by = self._plan, specs(module.split)
        a, b = (
            np.zeros(
                (module.layers, plan.bank_blocks, plan.quantum, width),
                jax.numpy.dtype(plan.dtype),
            )
            for width in (module.d, module.o)
        )
        return jax.device_put((a, b), (self._places.at(by.a_bank), self._places.at(by.b_bank)))

    @contextmanager
    def reading(self) -> Generator[BankArrays]:
        """Module -> (A [layers, blocks, quantum, D], B [..., O]), for a step of the user's own.

        No write happens inside the block. Dispatch the step there; it need not be done by its end.
        """
        with self.gate.reading():
            yield self.arrays

    @property
    def free_lanes(self) -> int:
        """Lanes that no adapter owns."""
        return len(self._free) * self._plan.quantum

    def lanes_of(self, slot: int) -> int:
        """Lanes that a slot's adapter owns; 0 for an empty slot."""
        return len(self.owned.get(slot, ())) * self._plan.quantum

    def put(self, slot: int, packed: Packed) -> None:
        """Puts an adapter into a slot, in place of what was there.

        Modules and layers that it lacks contribute nothing.

        Args:
          slot: 0 up to `max_adapters` - 1.
          packed: from `aot_lora.adapters.pack` or `pack_arrays`, for this plan.

        Raises:
          OutOfPlanError: a slot outside the plan. CapacityError: too few free lanes. Nothing has
            changed then.
        """
        plan = self._plan
        if not 0 <= slot < plan.max_adapters:
            raise OutOfPlanError(
                f"slot {slot} is outside the plan", expected=f"0 to {plan.max_adapters - 1}"
            )
        needed = round_up(packed.rank, plan.quantum)
        available = self.free_lanes + self.lanes_of(slot)
        if needed > available:
            raise CapacityError(
                "the banks are full",
                expected=f"at most {available} lanes",
                found=f"rank {packed.rank}",
                next_step="unload an adapter, or raise lora.resident_lanes and warm up",
            )
        self.gate.check_may_write()  # before anything changes
        # On the device before the first write: a step that reads a bank waits for its last write,
        # and must not wait for the copy from the host behind it.
        staged = jax.block_until_ready(
            {name: self._staged(name, weights) for name, weights in packed.modules.items()}
        )
        self.reset(slot)
        blocks = tuple(self._free.pop() for _ in range(needed // plan.quantum))
        indices = self._indices(blocks, packed.lanes)
        for name, arrays in staged.items():
            self._write("bank_write", name, packed.lanes, *arrays, indices)
        self.owned[slot] = blocks

    def _staged(self, name: str, weights: PackedModule) -> tuple[jax.Array, ...]:
        by, places = specs(self._modules[name].split), self._places
        return jax.device_put(
            (weights.a, weights.b, weights.scale),
            (places.at(by.a), places.at(by.b), places.everywhere),
        )

    def reset(self, slot: int) -> None:
        """Empties a slot: its lanes are zeroed and free again. An empty slot stays empty."""
        self.gate.check_may_write()  # before anything changes
        blocks = self.owned.pop(slot, ())
        if not blocks:
            return
        lanes = self._plan.adapter_lanes.bucket(len(blocks) * self._plan.quantum)
        indices = self._indices(blocks, lanes)
        for name in self.arrays:
            self._write("bank_reset", name, lanes, indices)
        self._free.extend(reversed(blocks))

    def _write(self, program: str, name: str, lanes: int, *arguments: Any) -> None:
        module = self._modules[name]
        dims = self._plan.dims(module, "do")
        executable = self._programs(Variant(program=program, lanes=lanes, dims=dims))
        with self.gate.writing():
            self.arrays[name] = executable(*self.arrays[name], *arguments)

    def _indices(self, blocks: tuple[int, ...], lanes: int) -> jax.Array:
        indices = np.zeros(lanes // self._plan.quantum, np.int32)
        indices[: len(blocks)] = blocks
        return jax.device_put(indices, self._places.everywhere)
