"""Calls a variant on stand-ins for its arguments: what warmup, server start and check share."""
# pyright: reportMissingImports=false

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.interop.dtypes import dtype_name
from aot_lora.interop.torch_xla.calls import Call
from aot_lora.interop.torch_xla.device import Device, tensors_of
from aot_lora.plan import Variant
from aot_lora.signature import ArraySpec

Spec = tuple[tuple[int, ...], Any]
"""Shape and torch dtype of a tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A called variant whose operations have not run yet.

    Args:
      tensors: what it returned or may have changed.
      signature: ``f32[16,64], i32[16] -> f32[16,64]``.
      trees: of its arguments and of its result.
      specs: of its arguments' leaves.
    """

    tensors: list[Any]
    signature: str
    trees: tuple[str, str]
    specs: tuple[Spec, ...]


class StandIns:
    """Zeros on the device, each made once; no two arguments of a call are the same tensor.

    Two that were would be one parameter, so another graph than with two tensors.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: dict[Spec, list[Any]] = defaultdict(list)

    def of(self, args: Any) -> Any:
        """`args` with zeros for tensors."""
        used: dict[Spec, int] = defaultdict(int)
        return pytree.tree_map(lambda leaf: self._one(leaf, used), args)

    def _one(self, leaf: Any, used: dict[Spec, int]) -> Any:
        import torch

        if not isinstance(leaf, torch.Tensor):
            return leaf
        spec = (tuple(leaf.shape), leaf.dtype)
        made = self._made[spec]
        if used[spec] == len(made):
            # From the host: zeros made on the device are a constant of the graph.
            made.append(torch.zeros(leaf.shape, dtype=leaf.dtype).to(self._device.device))
        used[spec] += 1
        return made[used[spec] - 1]


def trace(variant: Variant, call: Call, stand_ins: StandIns) -> Traced:
    """Calls a variant; torch_xla notes what it does, and runs nothing.

    Raises:
      ProgramError: it raises, or takes a tensor of 64 bits.
    """
    leaves, tree = pytree.tree_flatten(call.args)
    where = variant.name
    inputs = [_text(leaf, where) for leaf in leaves]
    args = stand_ins.of(call.args)
    try:
        result = call.fn(*args)
    except AotLoraError as error:
        raise type(error)(error.problem, **error.fields() | {"where": where}) from error
    except Exception as error:
        raise ProgramError(
            f"the program raised {type(error).__name__}: {str(error).strip()[:1000]}",
            where=where,
            next_step="mend the program; --debug shows where it raised",
        ) from error
    outputs, out_tree = pytree.tree_flatten(result)
    return Traced(
        tensors=tensors_of([*outputs, *pytree.tree_leaves(args)]),
        signature=f"{', '.join(inputs)} -> {', '.join(_text(leaf, '') for leaf in outputs)}",
        trees=(str(tree), str(out_tree)),
        specs=tuple((tuple(leaf.shape), leaf.dtype) for leaf in tensors_of(leaves)),
    )


def _text(leaf: Any, where: str) -> str:
    if not hasattr(leaf, "dtype"):
        return repr(leaf)
    name = dtype_name(leaf, where=where) if where else str(leaf.dtype).removeprefix("torch.")
    return str(ArraySpec(shape=tuple(leaf.shape), dtype=name))
