"""PEFT LoRA adapters: read, checked against a plan, packed for the banks. Numpy only: no jax.

An adapter is a folder with ``adapter_config.json`` and ``adapter_model.safetensors``. What the
tensors say counts; a config that says otherwise is refused, and so is whatever cannot be served
exactly. Nothing is unpickled, and nothing is skipped.

Letters: D inputs, O outputs, R rank, L lanes, N layers that hold a module. A *pair* is the A and
the B of one module in one layer; a *path* is a module's full name in the base model.
"""

from aot_lora.adapters.match import Match, ModuleMatch, match
from aot_lora.adapters.pack import Packed, PackedModule, pack, pack_arrays
from aot_lora.adapters.read import read_adapter
from aot_lora.adapters.values import Adapter, Pair, Tensor

__all__ = [
    "Adapter",
    "Match",
    "ModuleMatch",
    "Packed",
    "PackedModule",
    "Pair",
    "Tensor",
    "match",
    "pack",
    "pack_arrays",
    "read_adapter",
]
