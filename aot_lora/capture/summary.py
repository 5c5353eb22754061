"""Which functions a run compiled, how long that took, and why some were compiled several times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from aot_lora.capture.reasons import described, reason
from aot_lora.capture.records import Recorded

_LOOKED_AT = 64  # earlier compiles; a function that is compiled a thousand times has told its story
_EXPLAINED = 20  # compiles of one function


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """The nth compile of a function in one process: why, and who asked for it."""

    nth: int
    why: str
    at: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionSummary:
    """A function's compiles, in all processes."""

    function: str
    place: str
    compiles: int
    cache_hits: int
    seconds: float
    repeats: tuple[Repeat, ...]

    @property
    def name(self) -> str:
        """With its place, where that is not JAX's own."""
        return described(self.function, self.place)


def by_function(compiles: Sequence[Recorded]) -> tuple[FunctionSummary, ...]:
    """Those that took the longest first."""
    groups: dict[tuple[str, str], list[Recorded]] = defaultdict(list)
    for one in compiles:
        groups[one.fields["function"], one.fields.get("place", "")].append(one)
    found = [
        FunctionSummary(
            function=function,
            place=place,
            compiles=sum(one.outcome != "cache hit" for one in group),
            cache_hits=sum(one.outcome == "cache hit" for one in group),
            seconds=round(sum(one.seconds for one in group), 6),
            repeats=_repeats(group),
        )
        for (function, place), group in groups.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.seconds, one.function, one.place)))


def _repeats(group: Sequence[Recorded]) -> tuple[Repeat, ...]:
    repeats: list[Repeat] = []
    earlier: dict[str, list[Recorded]] = defaultdict(list)
    for one in group:
        before = earlier[one.process]
        if before and len(repeats) < _EXPLAINED:
            # The one before first: what is as near as that need not be looked for further back.
            others = [other.fields for other in reversed(before[-_LOOKED_AT:])]
            found = reason(one.fields, others)
            assert found is not None
            repeats.append(Repeat(nth=len(before) + 1, why=found.text, at=one.fields["at"]))
        before.append(one)
    return tuple(repeats)
