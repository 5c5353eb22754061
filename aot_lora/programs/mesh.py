"""How a mesh divides what LoRA programs take and return. One axis: tensor parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

AXIS = "tp"
"""The mesh's one axis, for `jax.lax.psum` and `PartitionSpec` in a step."""


def mesh_of(devices: Sequence[Any]) -> Mesh | None:
    """The mesh of these devices; None for one."""
    if len(devices) == 1:
        return None
    return Mesh(np.array(tuple(devices), dtype=object), (AXIS,), axis_types=(AxisType.Auto,))


def abstract_mesh(devices: int) -> AbstractMesh | None:
    """The mesh of so many devices that need not be there; None for one. Programs read the same."""
    return AbstractMesh((devices,), (AXIS,), axis_types=(AxisType.Auto,)) if devices > 1 else None


class Specs(NamedTuple):
    """`PartitionSpec` of each array of a module.

    Args:
      x: [T, D]; base: [T, O].
      a_bank: [layers, blocks, quantum, D]; b_bank: [layers, blocks, quantum, O].
      a: [layers, L, D]; b: [layers, O, L], one adapter's weights as a bank write takes them.
    """

    x: P
    base: P
    a_bank: P
    b_bank: P
    a: P
    b: P


_WHOLE = P()
_BY = {
    "o": Specs(_WHOLE, P(None, AXIS), _WHOLE, P(None, None, None, AXIS), _WHOLE, P(None, AXIS)),
    "d": Specs(
        P(None, AXIS), _WHOLE, P(None, None, None, AXIS), _WHOLE, P(None, None, AXIS), _WHOLE
    ),
}


def specs(split: Literal["d", "o"]) -> Specs:
    """The division of a module whose inputs (``d``) or outputs (``o``) a mesh divides.

    Divided outputs: A is whole on each device, so each has all of h and adds to its own outputs;
    nothing is exchanged. Divided inputs: each device has part of A and with it a share of h; in a
    step the expand of that share joins the base's sum, which is exchanged anyway.
    """
    return _BY[split]
