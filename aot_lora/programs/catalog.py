"""From a variant to its program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from aot_lora.plan import Plan, TargetSpec, Variant
from aot_lora.programs import user
from aot_lora.programs.lora import BUILDERS
from aot_lora.programs.mesh import abstract_mesh, mesh_of
from aot_lora.programs.spec import Context, Point, Program


class Catalog:
    """Builds the programs of a plan for one target; imports each user module once.

    Args:
      plan: the plan.
      target: what is compiled for.
      config: the config's file; user modules are looked for beside it.
      devices: to compile for, in the order of the mesh; not needed to trace.
    """

    def __init__(
        self,
        plan: Plan,
        target: TargetSpec,
        *,
        config: Path,
        devices: Sequence[Any] = (),
    ) -> None:
        mesh = mesh_of(devices) if devices else abstract_mesh(target.devices)
        self._context = Context(plan=plan, target=target, mesh=mesh)
        self._entries = {entry.name: entry for entry in plan.user}
        self._functions: dict[str, Callable[[Point, Context], Program]] = {}
        self._config = config

    def program(self, variant: Variant) -> Program:
        """The program of `variant`.

        Raises:
          ProgramError: a user program cannot be imported or called.
        """
        entry = self._entries.get(variant.program)
        if entry is None:
            return BUILDERS[variant.program](variant, self._context)
        if entry.name not in self._functions:
            self._functions[entry.name] = user.load_entry(entry, config=self._config)
        return user.build(self._functions[entry.name], variant, self._context)
