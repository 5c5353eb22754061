"""Calls a variant on stand-ins for its arguments: what warmup, server start and check share."""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import re
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
_NAME = re.compile(r"^module @\S+", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A called variant whose operations have not run yet.

    Args:
      tensors: what it returned or may have changed.
      inputs: tensors among its arguments; outputs: tensors of its result.
      numbers: torch_xla's of `inputs`.
      trees: of its arguments and of its result.
      specs: of `inputs`.
    """

    tensors: list[Any]
    inputs: tuple[ArraySpec, ...]
    outputs: tuple[ArraySpec, ...]
    numbers: tuple[int, ...]
    trees: tuple[str, str]
    specs: tuple[Spec, ...]

    @property
    def signature(self) -> str:
        """``x: f32[16,64], slots: i32[16] -> f32[16,64]``."""
        inputs = ", ".join(f"{spec.name}: {spec}" for spec in self.inputs)
        return f"{inputs} -> {', '.join(map(str, self.outputs))}"


class StandIns:
    """Zeros on the device, each made once; no two arguments of a call are the same tensor.

    Two that were would be one parameter, so another graph than with two tensors.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
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
            made.append(torch.zeros(leaf.shape, dtype=leaf.dtype).to(self.device.device))
        used[spec] += 1
        return made[used[spec] - 1]


def trace(variant: Variant, call: Call, stand_ins: StandIns) -> Traced:
    """Calls a variant; torch_xla notes what it does, and runs nothing.

    Raises:
      ProgramError: it raises, or takes a tensor of 64 bits.
    """
    where = variant.name
    names = call.names or tuple(inspect.signature(call.fn).parameters)
    leaves, tree = pytree.tree_flatten_with_path(call.args)
    wanted = tensors_of(leaf for _, leaf in leaves)
    inputs = tuple(
        _spec(leaf, where, name=names[path[0].idx] + pytree.keystr(path[1:]))
        for path, leaf in leaves
        if hasattr(leaf, "dtype")
    )
    for spec in inputs:
        if not spec.shape:
            raise ProgramError(
                f"`{spec.name}` has no dimensions",
                where=where,
                expected="at least one, for instance context.array(1, dtype='int32')",
                next_step="torch_xla makes 0 and 1 constants of the graph, another one for each",
            )
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
    results, out_tree = pytree.tree_flatten(result)
    given = tensors_of(pytree.tree_leaves(args))
    return Traced(
        tensors=tensors_of([*results, *given]),
        inputs=inputs,
        outputs=tuple(_spec(leaf) for leaf in tensors_of(results)),
        numbers=tuple(stand_ins.device.number(one) for one in given),
        trees=(str(tree), str(out_tree)),
        specs=tuple((tuple(leaf.shape), leaf.dtype) for leaf in wanted),
    )


def plain(stablehlo: str) -> str:
    """StableHLO without the module's name, in which torch_xla counts operations."""
    return _NAME.sub("module", stablehlo)


def _spec(leaf: Any, where: str = "", *, name: str = "") -> ArraySpec:
    """A tensor's spec; 64 bits are refused where `where` says where."""
    dtype = dtype_name(leaf, where=f"{where}: {name}") if where else str(leaf.dtype)
    return ArraySpec(shape=tuple(leaf.shape), dtype=dtype.removeprefix("torch."), name=name)
