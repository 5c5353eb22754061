"""Variants: a program, its point and its static options, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

Dims = tuple[tuple[str, int], ...]


class Variant(NamedTuple):
    """One executable of a plan. A tuple, because a lookup makes and hashes one.

    Args:
      program: the program's name, for instance ``lora_shrink``.
      tokens: token bucket T, or 0 where the program has no tokens axis.
      lanes: lane bucket L, or 0 where it has none (or for a batch without adapters).
      dims: static sizes by letter, for instance ``(("d", 4096),)``.
    """

    program: str
    tokens: int = 0
    lanes: int = 0
    dims: Dims = ()

    @property
    def name(self) -> str:
        """A readable name, unique in a plan: ``lora_shrink/t16-l64-d4096``."""
        sizes = [("t", self.tokens)] if self.tokens else []
        sizes += [("l", self.lanes), *self.dims]
        return self.program + "/" + "-".join(f"{letter}{size}" for letter, size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One bucket of each axis, as a user's function sees it.

    Args:
      tokens: rows T of the batch.
      lanes: lanes L of the batch's adapters; 0 for a batch without adapters.
    """

    tokens: int
    lanes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A projection that adapters may change.

    Args:
      name: for instance ``q_proj``.
      d, o: inputs D and outputs O, of all devices together.
      layers: how many have it; 1 for one outside the layers, such as ``lm_head``.
      split: what a mesh divides: ``o``, as of q_proj ("column-parallel": A is on every device, B
        divided), or ``d``, as of o_proj ("row-parallel": A divided, B on every device). As in
        Megatron-LM (Shoeybi et al. 2019).
    """

    name: str
    d: int
    o: int
    layers: int
    split: Literal["d", "o"] = "o"


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEntry:
    """A user's own program: ``module:function``, called once per point.

    Args:
      name: what `Runtime.lookup` calls it.
      entry: ``package.module:function``.
      max_tokens: the largest token bucket it is compiled for; None for all.
    """

    name: str
    entry: str
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """What executables are compiled for, as the config names it.

    Args:
      platform: ``cpu``, ``cuda`` or ``tpu``.
      topology: for a TPU the chips, for instance ``v6e:1x1``; for a GPU the name or file of its
        target config, for instance ``h200``, or empty for the one at hand; empty for a CPU.
      devices: how many a program runs on: the tensor parallelism of the mesh.
      target_config: what XLA has to know of the GPU to compile without it, a text proto.
      autotune: the SHA-256 of the recorded autotuning results beside the config, if there are any.
    """

    platform: str
    topology: str = ""
    devices: int = 1
    target_config: str = field(default="", repr=False)
    autotune: str = ""

    @property
    def deviceless(self) -> bool:
        """Whether it is compiled for without a device, on any host."""
        return self.platform == "tpu" or bool(self.target_config)

    def __str__(self) -> str:
        text = f"{self.platform} {self.topology}".strip()
        return text if self.devices == 1 else f"{text} tp={self.devices}"
