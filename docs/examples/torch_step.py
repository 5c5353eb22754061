"""A torch module with adapters as a step: `programs: [{entry: "torch_step:step"}]`.

`aot-lora warmup docs/examples/torch_step.yaml` calls `step` once per point and compiles what it
returns; `serve_torch_step.py` looks it up. Needs the extra `torchax`, or with
`--backend torch_xla` the extra `torch-xla`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from aot_lora.interop import program
from aot_lora.interop.layers import with_adapters

if TYPE_CHECKING:  # it imports jax, which torch_xla does without
    from aot_lora import Context, Point, Program


class Block(torch.nn.Module):
    """Two projections and a residual. Nothing in it knows of adapters."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = torch.nn.Linear(64, 128, bias=False)
        self.down_proj = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.nn.functional.silu(self.up_proj(x)))


def build() -> torch.nn.Module:
    """The whole model: two blocks."""
    return torch.nn.Sequential(Block(), Block())


def step(point: Point, context: Context) -> Program:
    """The step for one point: [T, 64] activations."""
    with torch.device("meta"):  # a warmup needs the weights' shapes only
        module = with_adapters(build().to(getattr(torch, context.plan.dtype)), context.plan)
    return program(module, (context.array(point.tokens, 64),), point, context)
