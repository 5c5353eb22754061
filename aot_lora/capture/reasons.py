"""Why a program was compiled though others like it were: what tells it from the nearest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aot_lora._jax_compat.described import call_from
from aot_lora.capture.records import key
from aot_lora.runtime.differences import Difference, arguments_text, nearest

_TOLD = 4  # differences
AGAIN = "the same program again: its function is a new object (jax.jit inside of a loop or call?)"
_CONTAINERS = "the same arguments in other containers (tuple, list, dict, class)"
_CODE = "the same arguments, other code: the function, or what it closes over, has changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """What was found nearest, and what differs from it, in words."""

    nearest: Mapping[str, Any]
    text: str


def reason(fields: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Reason | None:
    """The nearest of other compiles of the same function; None where there is none.

    Args:
      fields: of `compiles.describe`.
      others: likewise, or lines of a lock.
    """
    same = [other for other in others if other["function"] == fields["function"]]
    if not same:
        return None
    own = key(fields)
    same.sort(key=lambda other: key(other) != own)  # of those that are as near, the first is taken
    calls = [(call_from(other), other) for other in same]
    near = nearest(call_from(fields), (), [call for call, _ in calls])
    assert near is not None
    other = next(other for call, other in calls if call is near.expected)
    text = differences_text(near.differences)
    if not text and key(other) == own:
        text = AGAIN
    elif not text:
        text = _CODE if other.get("tree") == fields.get("tree") else _CONTAINERS
    return Reason(nearest=other, text=text)


def differences_text(differences: Sequence[Difference]) -> str:
    """The first few, in one line."""
    texts = [difference.text for difference in differences]
    if len(texts) > _TOLD:
        texts[_TOLD:] = [f"and {len(texts) - _TOLD} more"]
    return "; ".join(texts)


@dataclass(frozen=True, slots=True, kw_only=True)
class New:
    """A program that a lock does not hold.

    Args:
      function, place, arguments: what it is of.
      nearest: the arguments of the nearest in the lock; None where that has none of this name.
      why: what differs.
      outcome: ``cache hit``, or another of `Recorded`.
      fingerprint: of the program.
      at: who asked for it: the innermost frame that is in no installed package.
      frames: of who asked for it, the innermost first.
    """

    function: str
    place: str
    arguments: str
    nearest: str | None
    why: str
    outcome: str
    fingerprint: str
    at: str
    frames: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        hit = ", a cache hit" if self.outcome == "cache hit" else ""
        lines = [f"{described(self.function, self.place)} for {self.arguments}{hit}"]
        if self.nearest not in (None, self.arguments):
            lines.append(f"  nearest in the lock: {self.nearest}")
        lines.append(f"  {self.why}")
        if self.at:
            lines.append(f"  called from {self.at}")
        return lines


def new(fields: Mapping[str, Any], lock: Sequence[Mapping[str, Any]], outcome: str) -> New:
    """Says what a compile is that a lock does not hold.

    Args:
      fields: of `compiles.describe`.
      lock: the fields of its lines.
      outcome: of `Recorded`.
    """
    near = reason(fields, lock)
    return New(
        function=fields["function"],
        place=fields.get("place", ""),
        arguments=arguments_text(call_from(fields)),
        nearest=arguments_text(call_from(near.nearest)) if near else None,
        why=near.text if near else "the lock holds nothing by this name",
        outcome=outcome,
        fingerprint=fields["fingerprint"],
        at=fields["at"],
        frames=tuple(fields["frames"]),
    )


def described(function: str, place: str) -> str:
    """A function with its place, where that is not JAX's own."""
    return f"{function} ({place})" if place and not place.startswith("jax/") else function
