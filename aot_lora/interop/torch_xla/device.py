"""torch_xla as a process has it: one device, one cache on disk, and its own counters."""
# pyright: reportMissingImports=false

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from aot_lora.errors import UnsupportedError
from aot_lora.interop.versions import require_torch_xla

CACHE = "torch_xla"
"""The folder of its cache in a store."""
# Its own counters: graphs that it compiled, whose key was not on disk, and was there for nothing.
COMPILES, MISSES, UNLOADABLE = (
    "UncachedCompile",
    "PersistentCacheMiss",
    "PersistentCacheDeserializeFailure",
)
_LOCATIONS = ("XLA_IR_DEBUG", "XLA_HLO_DEBUG")


class Device:
    """torch_xla's first device.

    Args:
      store: the store's folder; its cache is in there.

    Raises:
      UnsupportedError: torch_xla cannot be imported or was opened otherwise before.
    """

    def __init__(self, store: Path) -> None:
        require_torch_xla()
        for name in _LOCATIONS:
            if os.environ.get(name, "0") not in ("", "0"):
                raise UnsupportedError(
                    f"{name} is set",
                    expected="graphs without source locations: they would be part of the keys",
                    next_step=f"unset {name}",
                )
        # Pallas kernels come through JAX, which puts paths and lines into them, and so into keys.
        os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
        # By name: a type checker takes `import torch_xla` in a folder of that name for the folder.
        self._xla: Any = import_module("torch_xla")
        self._metrics: Any = import_module("torch_xla.debug.metrics")
        self._model: Any = import_module("torch_xla.core.xla_model")
        self._runtime: Any = import_module("torch_xla.runtime")
        self._open_cache(store / CACHE)
        self.device: Any = self._xla.device()
        self.kind: str = str(self._runtime.device_type())

    def _open_cache(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        if not self._xla._XLAC._xla_computation_cache_is_initialized():
            self._runtime.initialize_cache(str(path))
        elif os.environ.get("XLA_PERSISTENT_CACHE_PATH") != str(path):
            raise UnsupportedError(
                "torch_xla compiled something before its cache was opened",
                expected=f"a process whose first use of torch_xla is this one, with {path}",
                found=f"XLA_PERSISTENT_CACHE_PATH {os.environ.get('XLA_PERSISTENT_CACHE_PATH')}",
                next_step="open it before any tensor is on the device, once a process",
            )

    def graph_hash(self, tensors: list[Any]) -> bytes:
        """What torch_xla looks up by before it compiles the pending operations of these."""
        return bytes(self._xla._XLAC._get_graph_hash(tensors))

    def stablehlo(self, tensors: list[Any]) -> str:
        """The pending operations of these as StableHLO text, without locations."""
        return str(self._model.get_stablehlo(tensors))

    def number(self, tensor: Any) -> int:
        """torch_xla's own number of a tensor."""
        return int(self._xla._XLAC._xla_get_tensor_id(tensor))

    def parameters(self, tensors: list[Any]) -> list[tuple[int, Any]]:
        """What the pending graph of these takes, in its own order: (number, value)."""
        numbers, values = self._xla._XLAC._get_tensors_xla_device_data_node(tensors)
        return list(zip(numbers, values, strict=True))

    def sync(self, tensors: list[Any], *, wait: bool = False) -> None:
        """Compiles unless it is in memory or on disk, and runs the pending operations of these."""
        self._xla._XLAC._xla_sync_multi(tensors, [], wait, True)

    def count(self, *counters: str) -> int:
        """The sum of torch_xla's own counters of these names."""
        return sum(self._metrics.counter_value(name) or 0 for name in counters)


def tensors_of(leaves: Iterable[Any]) -> list[Any]:
    """The tensors among leaves, each once."""
    import torch

    found = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    return list(found.values())
