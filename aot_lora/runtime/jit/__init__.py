"""`aot_lora.jit`: calls that are recorded once and looked up from then on."""

from aot_lora.runtime.jit.jitted import Jitted, jit
from aot_lora.runtime.jit.record import Recording, recording
from aot_lora.runtime.jit.replay import Replay, replay

__all__ = ["Jitted", "Recording", "Replay", "jit", "recording", "replay"]
