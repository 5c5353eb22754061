"""A torch module with LoRA layers as a call at one point."""
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from typing import Any

import torch

from aot_lora.interop.dtypes import dtype_name
from aot_lora.interop.layers import adapters
from aot_lora.interop.torch_xla.calls import Call, Context
from aot_lora.interop.torch_xla.kernels import lora_expand, lora_shrink
from aot_lora.plan import Point


def program(
    module: torch.nn.Module, inputs: tuple[Any, ...], point: Point, context: Context
) -> Call:
    """The call of a module's forward pass for one point.

    Its arguments are those of `aot_lora.interop.torchax.program`, as tensors.

    Args:
      module: from `with_adapters`; its weights may be on torch's meta device.
      inputs: what `forward` takes: pytrees of `Context.array`.
      point: the point.
      context: of the call.

    Raises:
      ProgramError: a weight is of 64 bits.
    """
    module.eval()
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    weights = {
        name: context.array(*tensor.shape, dtype=dtype_name(tensor, where=name))
        for name, tensor in tensors.items()
    }
    args: tuple[Any, ...] = (weights, *inputs)
    names = ("weights", *tuple(inspect.signature(module.forward).parameters)[: len(inputs)])
    if point.lanes:
        batch = context.batch(point.tokens, point.lanes)
        banks = {one.name: context.banks(one) for one in context.plan.modules}
        args = (*args, banks, batch.blocks, batch.owners, batch.slots)
        names = (*names, "banks", "blocks", "owners", "slots")

    def step(weights: Any, *given: Any) -> Any:
        own, lora = given[: len(inputs)], given[len(inputs) :]
        with torch.no_grad(), adapters(_adder(*lora) if lora else None):
            return torch.func.functional_call(module, weights, own)

    return Call(fn=step, args=args, names=names)


def _adder(banks: Any, blocks: Any, owners: Any, slots: Any) -> Any:
    def add(name: str, layer: int, x: Any, base: Any) -> Any:
        a_bank, b_bank = banks[name]
        rows, sums = x.reshape(-1, x.shape[-1]), base.reshape(-1, base.shape[-1])
        h = lora_shrink(rows, a_bank, layer, blocks, owners, slots)
        return lora_expand(sums, h, b_bank, layer, blocks, slots).reshape(base.shape)

    return add
