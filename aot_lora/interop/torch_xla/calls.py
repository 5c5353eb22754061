"""A plan's variants as calls of torch functions: what `programs` is for JAX."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from aot_lora.errors import ProgramError
from aot_lora.interop.torch_xla import kernels
from aot_lora.plan import Module, Plan, Point, Variant
from aot_lora.programs.entries import call_entry, import_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A function to call at one point.

    Args:
      fn: a function of positional arguments; it may change them in place.
      args: pytrees of tensors on torch's meta device, which say shapes and dtypes.
      names: what errors and the lock call the arguments; those of `fn` unless given.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The per-batch arguments that kernels share: as `aot_lora.BatchArgs`, but `layer` is [1]."""

    layer: Any
    blocks: Any
    owners: Any
    slots: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a user's function may need beside its point: as `aot_lora.Context`, for torch_xla.

    Args:
      plan: module shapes, layers, dtype, quantum, bank sizes.
    """

    plan: Plan

    def array(self, *shape: int, dtype: str | None = None) -> torch.Tensor:
        """An abstract tensor, of the plan's dtype unless given."""
        return torch.empty(shape, dtype=getattr(torch, dtype or self.plan.dtype), device="meta")

    def banks(self, module: Module) -> tuple[torch.Tensor, torch.Tensor]:
        """The A bank [layers, blocks, quantum, D] and B bank [..., O] of a module."""
        a_bank, b_bank = (self.bank(module.layers, width) for width in (module.d, module.o))
        return a_bank, b_bank

    def bank(self, layers: int, width: int) -> torch.Tensor:
        """One bank: [layers, blocks, quantum, width]."""
        return self.array(layers, self.plan.bank_blocks, self.plan.quantum, width)

    def batch(self, tokens: int, lanes: int) -> Batch:
        """The per-batch metadata of a point."""
        count = lanes // self.plan.quantum
        return Batch(
            layer=self.array(1, dtype="int32"),
            blocks=self.array(count, dtype="int32"),
            owners=self.array(count, dtype="int32"),
            slots=self.array(tokens, dtype="int32"),
        )


class Calls:
    """Builds the call of each variant of a plan; imports each user module once.

    Args:
      plan: the plan, for one device.
      config: the config's file; user modules are looked for beside it.
    """

    def __init__(self, plan: Plan, *, config: Path) -> None:
        if plan.tp > 1:
            raise ProgramError(
                "a mesh for torch_xla",
                where=f"{config}: mesh.tp",
                expected="1: its graphs here are of one device",
                found=str(plan.tp),
                next_step="remove `mesh:`, or serve through torchax, which has meshes",
            )
        self._context = Context(plan=plan)
        self._entries = {entry.name: entry for entry in plan.user}
        self._functions: dict[str, Callable[..., Any]] = {}
        self._config = config

    def call(self, variant: Variant) -> Call:
        """The call of a variant.

        Raises:
          ProgramError: a user program cannot be imported or called, or is none for torch_xla.
        """
        entry = self._entries.get(variant.program)
        if entry is None:
            return _own(variant, self._context)
        if entry.name not in self._functions:
            self._functions[entry.name] = import_entry(entry, config=self._config)
        point = Point(tokens=variant.tokens, lanes=variant.lanes)
        found = call_entry(self._functions[entry.name], variant, point, self._context)
        if not isinstance(found, Call):
            raise ProgramError(
                "the program is none for torch_xla",
                where=variant.name,
                expected="an aot_lora.interop.torch_xla.calls.Call",
                found=type(found).__name__,
                next_step="return aot_lora.interop.program(...), which serves both backends",
            )
        return found


def _own(v: Variant, c: Context) -> Call:
    size, batch = dict(v.dims), c.batch(v.tokens or 1, v.lanes)
    if v.program.startswith("lora_shrink"):
        x, bank = c.array(v.tokens, size["d"]), c.bank(size["n"], size["d"])
        args = (x, bank, batch.layer, batch.blocks, batch.owners, batch.slots)
        args = args[:4] if v.program.endswith("_single") else args
    elif v.program.startswith("lora_expand"):
        base, h = c.array(v.tokens, size["o"]), c.array(v.tokens, v.lanes)
        bank = c.bank(size["n"], size["o"])
        args = (base, h, bank, batch.layer, batch.blocks, batch.slots)
        args = args[:5] if v.program.endswith("_single") else args
    else:
        a_bank, b_bank = c.bank(size["n"], size["d"]), c.bank(size["n"], size["o"])
        a, b = c.array(size["n"], v.lanes, size["d"]), c.array(size["n"], size["o"], v.lanes)
        scale = c.array(size["n"], dtype="float32")
        written = (a, b, scale) if v.program == "bank_write" else ()
        args = (a_bank, b_bank, *written, batch.blocks)
    return Call(fn=getattr(kernels, v.program), args=args)
