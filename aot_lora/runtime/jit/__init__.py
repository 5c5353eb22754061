"""`aot_lora.jit`: calls that are recorded once and looked up from then on."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aot_lora.runtime.jit.jitted import Jitted, jit

if TYPE_CHECKING:
    from aot_lora.runtime.jit.recorder import Recording, recording
    from aot_lora.runtime.jit.replayer import Replay, replay

# A process that replays does not load what records, and one that does neither loads none.
_HOMES = {
    "Recording": "recorder",
    "recording": "recorder",
    "Replay": "replayer",
    "replay": "replayer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


__all__ = ["Jitted", "Recording", "Replay", "jit", "recording", "replay"]
