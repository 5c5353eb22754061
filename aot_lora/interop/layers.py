"""Linear layers that take adapters: they replace a torch module's own and keep its weights."""
# torch is an extra: without it the checker sees its classes as unknown.
# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from aot_lora.errors import ProgramError
from aot_lora.plan import Plan

Add = Callable[[str, int, Any, Any], Any]
"""(module's name, layer, x [..., D], base [..., O]) -> [..., O] with each row's adapter."""

_active: ContextVar[Add | None] = ContextVar("active adapters", default=None)


class LoraLinear(torch.nn.Linear):
    """A linear layer of one module of a plan; without adapters in the batch exactly `Linear`.

    Args:
      linear: whose weights it keeps, under the same names.
      adapts: the plan's module.
      layer: which of the module's layers.
    """

    def __init__(self, linear: torch.nn.Linear, adapts: str, layer: int) -> None:
        super().__init__(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta"
        )
        self.weight, self.bias = linear.weight, linear.bias
        self.adapts, self.layer = adapts, layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = super().forward(x)
        add = _active.get()
        return base if add is None else add(self.adapts, self.layer, x, base)


@contextmanager
def adapters(add: Add | None) -> Generator[None]:
    """Within, every `LoraLinear` adds what `add` says; None for a batch without adapters."""
    token = _active.set(add)
    try:
        yield
    finally:
        _active.reset(token)


def with_adapters(module: torch.nn.Module, plan: Plan) -> torch.nn.Module:
    """Replaces each linear layer that bears the name of a module of the plan, in place.

    Layers are numbered in the order in which the module holds them, as PEFT numbers them.

    Args:
      module: any torch module, its weights anywhere (``meta`` is enough to warm up).
      plan: of the config; its modules are looked for as the last part of a layer's path.

    Returns:
      `module`.

    Raises:
      ProgramError: a layer has other sizes than the plan, or there are more or fewer of them.
    """
    wanted = {one.name: one for one in plan.modules}
    found: Counter[str] = Counter()
    for path, child in list(module.named_modules()):
        parent, _, name = path.rpartition(".")
        if name not in wanted:
            continue
        shape = wanted[name]
        sizes = (getattr(child, "in_features", None), getattr(child, "out_features", None))
        if not isinstance(child, torch.nn.Linear) or sizes != (shape.d, shape.o):
            raise ProgramError(
                "not the layer that the config means",
                where=path,
                expected=f"a torch.nn.Linear of {shape.d} inputs and {shape.o} outputs",
                found=f"{type(child).__name__} of {sizes[0]} and {sizes[1]}",
                next_step="mend `model:` in the config, or leave it out of lora.modules",
            )
        setattr(module.get_submodule(parent), name, LoraLinear(child, name, found[name]))
        found[name] += 1
    for name, shape in wanted.items():
        if found[name] != shape.layers:
            raise ProgramError(
                f"{found[name]} layers called `{name}`",
                where=type(module).__name__,
                expected=f"{shape.layers}, as the config says",
                next_step="mend `layers:` in the config, or lora.modules",
            )
    return module
