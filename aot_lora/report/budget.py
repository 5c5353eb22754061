"""The memory of a device as one stacked bar. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from aot_lora.report.facts import MemoryFacts

_KINDS = (
    ("weights", "Weights"),
    ("banks", "Adapter banks"),
    ("cache", "KV cache"),
    ("temporaries", "Largest temporaries"),
    ("code", "Code"),
    ("others", "Other arguments"),
    ("outputs", "Results"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of the bar.

    Args:
      key, name: which; bytes: its size, more than 0.
      start, width: shares of the bar, 0 to 100.
    """

    key: str
    name: str
    bytes: int
    start: float
    width: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The bar.

    Args:
      parts: from left to right; total: their bytes.
      measured: whether by the compiler's analysis; else the config's figures alone.
      device, allowed: bytes, 0 where unknown; longest: see `MemoryFacts`.
      refused: what the compiler said if it did not fit.
      device_at, allowed_at: where they stand on the bar, 0 to 100; None where unknown.
    """

    parts: tuple[Part, ...]
    total: int
    measured: bool
    device: int
    allowed: int
    longest: int | None
    refused: str
    device_at: float | None
    allowed_at: float | None

    @property
    def free(self) -> int:
        """Bytes left of what is allowed; negative where it does not fit."""
        return self.allowed - self.total

    @property
    def fits(self) -> bool:
        """Whether it fits; where the device is unknown, nothing says no."""
        return not self.refused and (not self.device or self.free >= 0)


def budget(facts: MemoryFacts) -> Budget:
    """The bar of a target. It is as long as the device's memory, or as what does not fit in it."""
    memory = facts.memory
    scale = 100 / (max(facts.device, memory.total) or 1)
    parts: list[Part] = []
    at = 0
    for key, name in _KINDS:
        size = int(getattr(memory, key))
        if size:
            start, width = round(at * scale, 3), round(size * scale, 3)
            parts.append(Part(key=key, name=name, bytes=size, start=start, width=width))
        at += size
    return Budget(
        parts=tuple(parts),
        total=memory.total,
        measured=bool(memory.measured),
        device=facts.device,
        allowed=facts.allowed,
        longest=facts.longest,
        refused=memory.refused,
        device_at=round(facts.device * scale, 3) if facts.device else None,
        allowed_at=round(facts.allowed * scale, 3) if facts.device else None,
    )
