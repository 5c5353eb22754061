"""Shapes of real models for lora_project: tests, benchmarks and presets use the same."""

from __future__ import annotations

# (tokens, ranks of the adapters, D, O of each projection): of Llama-3.1-8B and of the tiny model.
CASES: tuple[tuple[int, tuple[int, ...], int, tuple[int, ...]], ...] = (
    (16, (8,), 64, (64,)),
    (16, (8, 64, 16), 128, (128, 64, 64)),
    (64, (128, 8, 8, 32), 64, (128, 128)),
    (16, (16,) * 8, 4096, (4096, 1024, 1024)),
    (128, (8, 16, 32, 64, 128), 4096, (14336, 14336)),
)
