"""What a program is: a function, its abstract arguments and what it donates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from aot_lora.plan import Module, Plan, TargetSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Something to compile for one point.

    Args:
      fn: a function of positional arguments that JAX can trace.
      args: its abstract arguments: pytrees of tuples, lists, dicts and
        `jax.ShapeDtypeStruct`.
      donate: positions of the arguments whose buffers the result may take over.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One bucket of each axis, as a user's function sees it.

    Args:
      tokens: rows T of the batch.
      lanes: lanes L of the batch's adapters; 0 for a batch without adapters.
    """

    tokens: int
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchArgs:
    """The per-batch arguments that kernels share: abstract here, arrays while serving.

    Args:
      layer: int32 scalar, for programs that take the layer as an argument.
      blocks: [L / quantum] int32; owners: [L / quantum] int32; slots: [T] int32.
    """

    layer: Any
    blocks: Any
    owners: Any
    slots: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What a user's function may need beside its point.

    Args:
      plan: module shapes, layers, dtype, quantum, bank sizes.
      target: what is compiled for.
    """

    plan: Plan
    target: TargetSpec

    def array(self, *shape: int, dtype: str | None = None) -> jax.ShapeDtypeStruct:
        """An abstract array; the dtype is the plan's unless given."""
        return jax.ShapeDtypeStruct(shape, dtype or self.plan.dtype)

    def banks(self, module: Module) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The A bank [layers, blocks, quantum, D] and B bank [..., O] of a module."""
        return self.bank(module.layers, module.d), self.bank(module.layers, module.o)

    def bank(self, layers: int, width: int) -> jax.ShapeDtypeStruct:
        """One bank: [layers, blocks, quantum, width]."""
        return self.array(layers, self.plan.bank_blocks, self.plan.quantum, width)

    def batch(self, tokens: int, lanes: int) -> BatchArgs:
        """The per-batch metadata of a point."""
        count = lanes // self.plan.quantum
        return BatchArgs(
            layer=self.array(dtype="int32"),
            blocks=self.array(count, dtype="int32"),
            owners=self.array(count, dtype="int32"),
            slots=self.array(tokens, dtype="int32"),
        )
