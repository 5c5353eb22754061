"""Shapes of real models for lora_segments: tests, benchmarks and presets use the same."""

from __future__ import annotations

# (tokens, lanes, d, o) of Llama-3.1-8B and of the tiny model.
CASES = (
    (16, 8, 64, 128),
    (64, 128, 64, 64),
    (128, 256, 4096, 4096),
)
