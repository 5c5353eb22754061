"""What a program is: a function, its abstract arguments and what it donates."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from aot_lora.plan import Module, Plan, Point, TargetSpec
from aot_lora.programs.mesh import specs

__all__ = ["BatchArgs", "Context", "Point", "Program"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Something to compile for one point.

    Args:
      fn: a function of positional arguments that JAX can trace.
      args: its abstract arguments: pytrees of tuples, lists, dicts and
        `jax.ShapeDtypeStruct`. On a mesh each has a sharding; `Context.array` gives one.
      donate: positions of the arguments whose buffers the result may take over.
      static: further arguments by name: hashable values that are part of the program.
      names: what errors and the lock call the arguments; those of `fn` unless given.
      out_shardings: of the results, a pytree prefix of shardings; the compiler's choice unless
        given.
      auto_layouts: positions of the arguments whose layout in memory is the compiler's choice, for
        instance weights on a TPU. Put them as `executable.input_formats` says; others are refused.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    static: Mapping[str, Hashable] = field(default_factory=dict[str, Hashable])
    names: tuple[str, ...] = ()
    out_shardings: Any = None
    auto_layouts: tuple[int, ...] = ()


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
      mesh: what programs are divided over, with or without devices behind it; None for one device.
    """

    plan: Plan
    target: TargetSpec
    mesh: Mesh | AbstractMesh | None = None

    def sharding(self, spec: PartitionSpec) -> NamedSharding | None:
        """A sharding over the mesh; None for one device."""
        return NamedSharding(self.mesh, spec) if self.mesh else None

    def array(
        self, *shape: int, dtype: str | None = None, spec: PartitionSpec | None = None
    ) -> jax.ShapeDtypeStruct:
        """An abstract array.

        Args:
          shape: of all devices together.
          dtype: the plan's unless given.
          spec: how the mesh divides it; whole on each device unless given.
        """
        sharding = self.sharding(spec or PartitionSpec())
        return jax.ShapeDtypeStruct(shape, dtype or self.plan.dtype, sharding=sharding)

    def banks(self, module: Module) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        """The A bank [layers, blocks, quantum, D] and B bank [..., O] of a module, divided."""
        by = specs(module.split)
        a_bank = self.bank(module.layers, module.d, spec=by.a_bank)
        return a_bank, self.bank(module.layers, module.o, spec=by.b_bank)

    def bank(self, layers: int, width: int, *, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """One bank: [layers, blocks, quantum, width]."""
        return self.array(layers, self.plan.bank_blocks, self.plan.quantum, width, spec=spec)

    def batch(self, tokens: int, lanes: int) -> BatchArgs:
        """The per-batch metadata of a point."""
        count = lanes // self.plan.quantum
        return BatchArgs(
            layer=self.array(dtype="int32"),
            blocks=self.array(count, dtype="int32"),
            owners=self.array(count, dtype="int32"),
            slots=self.array(tokens, dtype="int32"),
        )
