"""Shapes of real models for lora_expand: tests, benchmarks and presets use the same."""

from __future__ import annotations

# (tokens, lanes, width): width is O of Llama-3.1-8B and of the tiny model.
CASES = (
    (16, 8, 64),
    (16, 64, 128),
    (64, 128, 64),
    (16, 128, 4096),
    (128, 64, 14336),
)
