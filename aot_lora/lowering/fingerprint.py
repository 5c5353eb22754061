"""A hash of what a program does, that stays put where only its surroundings move."""

from __future__ import annotations

import hashlib
import json

from aot_lora.lowering.canonical import Canonical, canonical


def fingerprint(stablehlo: str | Canonical, *, trees: tuple[str, str]) -> str:
    """SHA-256 of what a program does and of its pytrees, as 32 hex digits.

    Args:
      stablehlo: of the lowered program, printed without locations, or what `canonical` made of it.
      trees: `in_tree` and `out_tree` of its signature.
    """
    one = stablehlo if isinstance(stablehlo, Canonical) else canonical(stablehlo)
    # (x,), [x] and (x, None) lower to the same text, and are called differently.
    framed = json.dumps([one.text, *trees])
    return hashlib.sha256(framed.encode()).hexdigest()[:32]
