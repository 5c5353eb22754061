"""A hash of what a program does, that stays put where only its surroundings move."""

from __future__ import annotations

import hashlib
import json
import re

# One chip needs no mesh, but naming its device makes JAX write an empty one.
_EMPTY_MESH = re.compile(r"^ *sdy\.mesh @empty_mesh = .*\n", re.MULTILINE)
_EMPTY_SHARDING = re.compile(r"sdy\.sharding = #sdy\.sharding<@empty_mesh, \[[^>]*\]>(?:, )?")
_EMPTY_ATTRIBUTES = re.compile(r" \{\}(?=[,)])")


def fingerprint(stablehlo: str, *, trees: tuple[str, str]) -> str:
    """SHA-256 of StableHLO text printed without locations and of the pytrees, as 32 hex digits.

    Traced under `prepare_tracing`, the text holds no path and no line number. Shardings over
    the empty mesh do not count, so that naming a single device to compile for does not either.

    Args:
      stablehlo: of the lowered program.
      trees: `in_tree` and `out_tree` of its signature.
    """
    text = _EMPTY_SHARDING.sub("", _EMPTY_MESH.sub("", stablehlo))
    text = _EMPTY_ATTRIBUTES.sub("", text)
    # (x,), [x] and (x, None) lower to the same text, and are called differently.
    framed = json.dumps([text, *trees])
    return hashlib.sha256(framed.encode()).hexdigest()[:32]
