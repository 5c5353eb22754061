"""Two texts of canonical IR: what differs between them, to read."""

from __future__ import annotations

import re
from difflib import SequenceMatcher

_SSA = re.compile(r"%\w+(?:[#:]\d+)?")
_CONSTANT = re.compile(r"dense<[^>]*>|dense_resource<[^>]*>|value = [^,}]*")
_CONTEXT = 2
_MOST_LINES = 120
_WIDTH = 200


def diff(old: str, new: str) -> tuple[str, ...]:
    """Lines that differ, behind - and +, with two of context; a value's number is no difference."""
    before, after = old.splitlines(), new.splitlines()
    matcher = SequenceMatcher(None, _masked(before), _masked(after), autojunk=False)
    lines: list[str] = []
    for hunk in matcher.get_grouped_opcodes(_CONTEXT):
        lines.append(f"@@ line {hunk[0][1] + 1} -> line {hunk[0][3] + 1} @@")
        for tag, i1, i2, j1, j2 in hunk:
            if tag == "equal":
                lines += [f"  {line}" for line in after[j1:j2]]
                continue
            lines += [f"- {line}" for line in before[i1:i2]]
            lines += [f"+ {line}" for line in after[j1:j2]]
    if not lines:  # Only which value goes where.
        pairs = zip(before, after, strict=True)
        lines = [
            f"{sign} {text}" for a, b in pairs if a != b for sign, text in (("-", a), ("+", b))
        ]
    hidden = len(lines) - _MOST_LINES
    cut = [line if len(line) <= _WIDTH else line[:_WIDTH] + "…" for line in lines[:_MOST_LINES]]
    return (*cut, *([f"… and {hidden} more lines"] if hidden > 0 else []))


def nature(one: str, other: str) -> str:
    """What kind of difference it is, in words."""
    before, after = _masked(one.splitlines()), _masked(other.splitlines())
    if sorted(before) == sorted(after):
        return "the same operations in another order, as from a set or dict"
    plain = [[_CONSTANT.sub("", line) for line in lines] for lines in (before, after)]
    if plain[0] == plain[1]:
        return "other values of constants, as of a captured array or a Python scalar"
    if sorted(plain[0]) == sorted(plain[1]):
        return "other constants in another order"
    return f"other operations ({len(before)} and {len(after)} lines)"


def _masked(lines: list[str]) -> list[str]:
    return [_SSA.sub("%", line) for line in lines]
