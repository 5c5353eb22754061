"""Variants: a program, its point and its static options, as one frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


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
    dims: tuple[tuple[str, int], ...] = ()

    @property
    def name(self) -> str:
        """A readable name, unique in a plan: ``lora_shrink/t16-l64-d4096``."""
        sizes = [("t", self.tokens)] if self.tokens else []
        sizes += [("l", self.lanes), *self.dims]
        return self.program + "/" + "-".join(f"{letter}{size}" for letter, size in sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A projection that adapters may change: D inputs, O outputs, in so many layers.

    `layers` is 1 for one outside the layers, such as ``lm_head``.
    """

    name: str
    d: int
    o: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UserEntry:
    """A user's own program: ``module:function``, called once per point.

    Args:
      name: what `Runtime.lookup` calls it.
      entry: ``package.module:function``.
    """

    name: str
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What executables are compiled for, as the config names it.

    Args:
      platform: ``cpu``, ``cuda`` or ``tpu``.
      topology: for a TPU the chips, for instance ``v6e:1x1``; empty otherwise.
    """

    platform: str
    topology: str = ""

    def __str__(self) -> str:
        return f"{self.platform} {self.topology}".strip()
