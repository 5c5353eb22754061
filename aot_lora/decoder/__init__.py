"""A decoder of Llama's family in plain JAX, whose steps are ordinary programs of a plan.

It is the reference that adapters are checked and LoRA implementations are measured inside. Name
its steps in a config that has a `kv_cache`:

    programs:
      - lora
      - {entry: "aot_lora.decoder:mixed_step"}
      - {entry: "aot_lora.decoder:decode_step", max_tokens: 16}    # kv_cache.sequences

Letters: T tokens (rows of a step), N layers, V vocabulary, and those of `aot_lora`.
"""

from aot_lora.decoder.checkpoint import load_checkpoint
from aot_lora.decoder.lora import LoraMaker, chosen_lora
from aot_lora.decoder.model import step
from aot_lora.decoder.programs import decode_step, mixed_step, step_program
from aot_lora.decoder.session import Session
from aot_lora.decoder.sharding import Specs, specs
from aot_lora.decoder.weights import Weights, random_weights

__all__ = [
    "LoraMaker",
    "Session",
    "Specs",
    "Weights",
    "chosen_lora",
    "decode_step",
    "load_checkpoint",
    "mixed_step",
    "random_weights",
    "specs",
    "step",
    "step_program",
]
