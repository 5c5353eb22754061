"""A torch module with LoRA layers as a program of a plan, through torchax.

torchax traces torch as JAX, so that everything else is as for any program: `warmup`, `check`,
`verify`, targets, the store, and a server that only looks up, for which it needs no torch.

Works with torch 2.9 to 2.12 and torchax 0.0.13, which tpu-inference pins.
"""
# torch and torchax are extras: without them the checker finds neither.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from jax.sharding import PartitionSpec

from aot_lora.interop.dtypes import dtype_name, numpy_of
from aot_lora.interop.versions import require_own_files, require_torchax
from aot_lora.kernels import lora_expand, lora_shrink
from aot_lora.programs.spec import Context, Point, Program

if TYPE_CHECKING:
    import torch


def program(
    module: torch.nn.Module,
    inputs: tuple[Any, ...],
    point: Point,
    context: Context,
    *,
    donate: tuple[int, ...] = (),
    specs: Mapping[str, PartitionSpec] | None = None,
) -> Program:
    """The program of a module's forward pass for one point.

    Its arguments: ``weights``, a dict of the module's parameters and buffers by name, as `weights`
    gives them; the inputs; and, where the batch has adapters, ``banks``, a dict of (A bank, B bank)
    by module as `Runtime.banks.arrays` is, ``blocks``, ``owners`` and ``slots``.

    Args:
      module: from `with_adapters`, in evaluation mode; its weights may be on torch's meta device.
      inputs: what `forward` takes: pytrees of `Context.array`. Rows of all leading axes together
        are the batch's tokens wherever a layer has adapters.
      point: the point.
      context: of the call.
      donate: positions in `inputs` of what the result may take over, such as a KV cache.
      specs: how a mesh divides weights, by name; the others are whole on each device.

    Returns:
      The program; its result is what `forward` returns, with arrays for tensors.

    Raises:
      UnsupportedError: the installed torch and torchax do not work together.
      ProgramError: a weight is of 64 bits.
    """
    require_torchax()
    module.eval()
    shapes = {
        name: context.array(
            *tensor.shape, dtype=dtype_name(tensor, where=name), spec=(specs or {}).get(name)
        )
        for name, tensor in _tensors(module).items()
    }
    forward = tuple(inspect.signature(module.forward).parameters)[: len(inputs)]
    args: tuple[Any, ...] = (shapes, *inputs)
    names = ("weights", *forward)
    if point.lanes:
        batch = context.batch(point.tokens, point.lanes)
        banks = {one.name: context.banks(one) for one in context.plan.modules}
        args = (*args, banks, batch.blocks, batch.owners, batch.slots)
        names = (*names, "banks", "blocks", "owners", "slots")
    return Program(
        fn=_traceable(module, len(inputs)),
        args=args,
        names=names,
        donate=tuple(1 + position for position in donate),
    )


def weights(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """A module's weights as its program takes them: ``jax.device_put(weights(m), runtime.device)``.

    Raises:
      ProgramError: one is of 64 bits.
    """
    return {name: numpy_of(tensor, where=name) for name, tensor in _tensors(module).items()}


def _tensors(module: torch.nn.Module) -> dict[str, Any]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def _traceable(module: torch.nn.Module, inputs: int) -> Callable[..., Any]:
    """`module` as a function of JAX arrays."""
    import torch

    # By name: a type checker takes `import torchax` in a file of that name for the file itself.
    torchax, views = import_module("torchax"), import_module("torchax.interop")
    require_own_files(torchax)

    from aot_lora.interop.layers import adapters

    def add_of(banks: Any, blocks: Any, owners: Any, slots: Any) -> Any:
        def add(name: str, layer: int, x: Any, base: Any) -> Any:
            a_bank, b_bank = banks[name]

            def kernels(x: Any, base: Any) -> Any:
                rows, sums = x.reshape(-1, x.shape[-1]), base.reshape(-1, base.shape[-1])
                h = lora_shrink(rows, a_bank, layer, blocks, owners, slots)
                return lora_expand(sums, h, b_bank, layer, blocks, slots).reshape(base.shape)

            return views.call_jax(kernels, x, base)

        return add

    def step(weights: Any, *args: Any) -> Any:
        own, lora = args[:inputs], args[inputs:]
        with torchax.default_env(), torch.no_grad(), adapters(add_of(*lora) if lora else None):
            given = views.torch_view((weights, own))
            return views.jax_view(torch.func.functional_call(module, *given))

    return step
