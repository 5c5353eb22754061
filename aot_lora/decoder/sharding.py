"""How weights, cache and banks are split over the chips of tensor parallelism.

Column-parallel projections split their outputs, row-parallel ones their inputs (Megatron-LM, arXiv
1909.08053). The banks follow: A is whole and B split on O, or A split on D and B whole, so that a
row-parallel base and its adapters are partial sums of one and the same sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from aot_lora.decoder.weights import decoder_of
from aot_lora.errors import ProgramError
from aot_lora.plan import COLUMN_MODULES, HEAD_MODULE, ROW_MODULES, DecoderShape, Plan
from aot_lora.programs import mesh
from aot_lora.programs.mesh import AXIS


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """Trees of `PartitionSpec`, each like the argument of its name. The other arguments are whole.

    Args:
      weights, cache, banks: see `step_program`.
    """

    weights: dict[str, Any]
    cache: dict[str, Any]
    banks: dict[str, tuple[P, P]]


def specs(plan: Plan, *, tp: int, apart: bool = False) -> Specs:
    """The split of a plan's decoder over `tp` chips.

    Args:
      plan: with a decoder and a cache.
      tp: chips of the mesh.
      apart: whether each layer's arrays are by themselves.

    Raises:
      ProgramError: `tp` does not divide what it has to split, or the config splits a module
        otherwise than a decoder does.
    """
    shape, _ = decoder_of(plan)
    _check(shape, tp)
    for module in plan.modules:
        if (module.split == "d") != (module.name in ROW_MODULES):
            raise ProgramError(
                f"a decoder does not split {module.name} like that",
                where="mesh.row_parallel",
                expected=f"{', '.join(ROW_MODULES)} and no others",
                next_step="leave mesh.row_parallel out",
            )
    column, row = P(None, None, AXIS), P(None, AXIS, None)
    layers = dict.fromkeys(COLUMN_MODULES, column) | dict.fromkeys(ROW_MODULES, row)
    layers |= {"input_norm": P(), "post_norm": P()}
    weights: dict[str, Any] = {"embed": P(AXIS, None), "norm": P(), "layers": layers}
    if not shape.tied:
        weights[HEAD_MODULE] = P(None, AXIS)
    heads: Any = P(None, None, AXIS)
    if apart:
        one = {name: P(*spec[1:]) for name, spec in layers.items()}
        weights["layers"] = [one] * plan.layers
        heads = [P(*heads[1:])] * plan.layers
    divided = {module.name: mesh.specs(module.split) for module in plan.modules}
    return Specs(
        weights=weights,
        cache={"k": heads, "v": heads},
        banks={name: (by.a_bank, by.b_bank) for name, by in divided.items()},
    )


def _check(shape: DecoderShape, tp: int) -> None:
    for name in ("heads", "kv_heads", "intermediate", "vocab"):
        size = getattr(shape, name)
        if size % tp:
            raise ProgramError(
                f"{size} {name} cannot be split over {tp} chips",
                where="aot_lora.decoder.specs",
                expected=f"a tp that divides {size}",
                found=f"tp={tp}",
                next_step="use fewer chips, or pad the model",
            )
