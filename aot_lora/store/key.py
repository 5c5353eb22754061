"""Keys of named parts: a hash to look up by, and the parts to explain a miss with."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

from aot_lora.store.artifact import FORMAT

_LONG = 64


def shorten(parts: Mapping[str, str]) -> dict[str, str]:
    """The parts with long values replaced by their digests."""
    return {
        name: value if len(value) <= _LONG else "sha256:" + _hex(value)[:32]
        for name, value in parts.items()
    }


def key_of(parts: Mapping[str, str]) -> str:
    """SHA-256 over the parts, framed by JSON, as 40 hex digits; the format number counts."""
    framed = json.dumps({"format": FORMAT, **shorten(parts)}, sort_keys=True)
    return _hex(framed)[:40]


def differences(expected: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """One line for each part that differs: its name, what this host has, what was stored."""
    lines: list[str] = []
    for name in [*expected, *(name for name in found if name not in expected)]:
        here, there = expected.get(name, "nothing"), found.get(name, "nothing")
        if here == there:
            continue
        if len(here) > _LONG or len(there) > _LONG:
            missing = sorted(set(there.split()) - set(here.split()))[:8]
            added = sorted(set(here.split()) - set(there.split()))[:8]
            here, there = " ".join(added) or "less", " ".join(missing) or "less"
        elif len(here) == len(there) == _LONG:
            here, there = here[:12] + "…", there[:12] + "…"  # two SHA-256
        lines.append(f"{name}: here {here or 'none'}, stored {there or 'none'}")
    return lines


def _hex(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
