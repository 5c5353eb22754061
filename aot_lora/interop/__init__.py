"""Where aot-lora meets the tools of others: pytest, and programs written in PyTorch.

The latter run through torchax as JAX, or with torch_xla on its own device.
Importing this loads no torch; what needs it checks the installed versions first.
"""

from __future__ import annotations

from typing import Any


def program(module: Any, inputs: tuple[Any, ...], point: Any, context: Any) -> Any:
    """A torch module's forward pass as a program of a plan, for whichever backend asks.

    See `aot_lora.interop.torchax.program`, and `aot_lora.interop.torch_xla.modules.program`.

    Args:
      module: a torch module, from `aot_lora.interop.layers.with_adapters`.
      inputs: what its `forward` takes: pytrees of `context.array`.
      point, context: as the user's function got them.
    """
    if type(context).__module__ == "aot_lora.interop.torch_xla.calls":
        from aot_lora.interop.torch_xla.modules import program
    else:
        from aot_lora.interop.torchax import program
    return program(module, inputs, point, context)
