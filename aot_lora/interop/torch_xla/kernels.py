"""The kernels of `aot_lora.kernels` in torch, with the same arguments and results.

Factors are widened to float32 before they are multiplied: torch has no product of bfloat16 with a
float32 result, and not every CPU runtime has one. A TPU multiplies float32 in bfloat16 by default,
so widening changes nothing there: these values came from bfloat16.
"""
# pyright: reportMissingImports=false

from __future__ import annotations

import torch
from torch import Tensor

from aot_lora.errors import ProgramError


def lora_shrink(
    x: Tensor, a_bank: Tensor, layer: Tensor | int, blocks: Tensor, owners: Tensor, slots: Tensor
) -> Tensor:
    """Projects each row onto the lanes of its own adapter: [T, L]. As `aot_lora.kernels` says.

    Raises:
      ProgramError: an index is not of int32.
    """
    _require_int32(owners=owners, slots=slots)
    quantum = a_bank.shape[2]
    of_lanes = owners[:, None].expand(owners.shape[0], quantum).reshape(-1)
    h = _lanes(x, a_bank, layer, blocks)
    return torch.where(slots[:, None] == of_lanes[None, :], h, torch.zeros_like(h)).to(x.dtype)


def lora_shrink_single(x: Tensor, a_bank: Tensor, layer: Tensor | int, blocks: Tensor) -> Tensor:
    """`lora_shrink` without a mask, where every row has the same adapter."""
    return _lanes(x, a_bank, layer, blocks).to(x.dtype)


def lora_expand(
    base: Tensor, h: Tensor, b_bank: Tensor, layer: Tensor | int, blocks: Tensor, slots: Tensor
) -> Tensor:
    """Adds each row's adapter into the base output: [T, O]; rows of -1 stay bit for bit."""
    _require_int32(slots=slots)
    adapted = lora_expand_single(base, h, b_bank, layer, blocks)
    return torch.where(slots[:, None] >= 0, adapted, base)


def lora_expand_single(
    base: Tensor, h: Tensor, b_bank: Tensor, layer: Tensor | int, blocks: Tensor
) -> Tensor:
    """`lora_expand` without a mask, where every row has the same adapter."""
    b = gather_lanes(b_bank, layer, blocks)
    return (base.float() + h.float() @ b.float()).to(base.dtype)


def bank_write(
    a_bank: Tensor, b_bank: Tensor, a: Tensor, b: Tensor, scale: Tensor, blocks: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes one adapter's lanes of one module, all layers, into its blocks, in place."""
    scaled = (b.float() * scale[:, None, None]).to(b_bank.dtype)
    return _put(a_bank, a, blocks), _put(b_bank, scaled.transpose(1, 2), blocks)


def bank_reset(a_bank: Tensor, b_bank: Tensor, blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Zeroes blocks of both banks, in place."""
    lanes = blocks.shape[0] * a_bank.shape[2]
    a, b = (bank.new_zeros((bank.shape[0], lanes, bank.shape[3])) for bank in (a_bank, b_bank))
    return _put(a_bank, a, blocks), _put(b_bank, b, blocks)


def gather_lanes(bank: Tensor, layer: Tensor | int, blocks: Tensor) -> Tensor:
    """Lays the lanes of a layer's `blocks` side by side: [n * quantum, width]."""
    _require_int32(blocks=blocks)
    layers, count, quantum, width = bank.shape
    rows = bank.reshape(layers * count, quantum, width).index_select(0, layer * count + blocks)
    return rows.reshape(blocks.shape[0] * quantum, width)


def _lanes(x: Tensor, a_bank: Tensor, layer: Tensor | int, blocks: Tensor) -> Tensor:
    return x.float() @ gather_lanes(a_bank, layer, blocks).float().T


def _put(bank: Tensor, lanes: Tensor, blocks: Tensor) -> Tensor:
    _require_int32(blocks=blocks)
    layers, _, quantum, width = bank.shape
    rows = lanes.reshape(layers, blocks.shape[0], quantum, width)
    return bank.index_copy_(1, blocks.long(), rows)  # torch takes no other index for a copy


def _require_int32(**indices: Tensor) -> None:
    for name, index in indices.items():
        if index.dtype != torch.int32:
            raise ProgramError(
                f"`{name}` is of {str(index.dtype).removeprefix('torch.')}",
                expected="int32: torch's own default of int64 is another graph, and a TPU "
                "emulates it",
                found=f"{index.dtype}{list(index.shape)}",
                next_step="make it with dtype=torch.int32, or take it from `Steps.batch`",
            )
