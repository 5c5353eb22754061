"""How two signatures of a lock differ, in words: which argument, and what of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ARRAY = re.compile(r"(~?)(\w+)\[([^\]]*)\]")
_OPENING, _CLOSING = "([{<", ")]}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference.

    Args:
      what: without sizes, so that variants of many sizes have it in common: ``x: dtype``.
      detail: with both sides: ``x: f32[4] -> bf16[4]``.
    """

    what: str
    detail: str


def differences(locked: str, now: str) -> tuple[Difference, ...]:
    """What differs between two signatures, as a lock's lines hold them; at least one thing."""
    old, new = _Parsed(locked), _Parsed(now)
    found = [*_arguments(old, new)] or [*_results(old, new)]  # Those follow from the arguments.
    if old.mesh != new.mesh:
        detail = f"mesh: {old.mesh or 'none'} -> {new.mesh or 'none'}"
        found.append(Difference(what=detail, detail=detail))
    return tuple(found) or (Difference(what="its text", detail=f"{locked} -> {now}"),)


class _Parsed:
    def __init__(self, text: str) -> None:
        inputs, _, outputs = text.rpartition(" -> ")
        outputs, _, self.mesh = outputs.partition(" on ")
        self.results = _split(outputs)
        self.arguments: list[tuple[str, str]] = []
        for item in _split(inputs):
            name, colon, kind = item.rpartition(": ")
            if not colon:
                name, _, kind = item.partition("=")
            donated = name.startswith("donated ")
            self.arguments.append(
                (name.removeprefix("donated "), ("donated " if donated else "") + kind)
            )


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    items, depth, start = list[str](), 0, 0
    for at, letter in enumerate(text):
        depth += (letter in _OPENING) - (letter in _CLOSING)
        if depth == 0 and text.startswith(", ", at):
            items.append(text[start:at])
            start = at + 2
    return [*items, text[start:]] if text else []


def _arguments(old: _Parsed, new: _Parsed) -> Iterator[Difference]:
    names, now = dict(old.arguments), dict(new.arguments)
    kinds_agree = [k for _, k in old.arguments] == [k for _, k in new.arguments]
    if kinds_agree:
        for (was, kind), (is_, _) in zip(old.arguments, new.arguments, strict=True):
            if was != is_:
                what = f"argument {was} is called {is_}"
                yield Difference(what=what, detail=f"{what}: {kind}")
        return
    for name, kind in old.arguments:
        if name not in now:
            yield Difference(what=f"argument {name} is gone", detail=f"{name}: {kind} -> nothing")
        elif now[name] != kind:
            yield _changed(f"argument {name}", kind, now[name])
    for name, kind in new.arguments:
        if name not in names:
            yield Difference(what=f"argument {name} is new", detail=f"{name}: nothing -> {kind}")
    if [n for n, _ in old.arguments if n in now] != [n for n, _ in new.arguments if n in names]:
        order = " -> ".join(", ".join(n for n, _ in one.arguments) for one in (old, new))
        yield Difference(what="order of the arguments", detail=f"order: {order}")


def _results(old: _Parsed, new: _Parsed) -> Iterator[Difference]:
    if len(old.results) != len(new.results):
        count = f"{len(old.results)} -> {len(new.results)}"
        detail = f"results: {', '.join(old.results)} -> {', '.join(new.results)}"
        yield Difference(what=f"number of results {count}", detail=detail)
        return
    for at, (was, is_) in enumerate(zip(old.results, new.results, strict=True)):
        if was != is_:
            yield _changed(f"result {at}", was, is_)


def _changed(where: str, was: str, is_: str) -> Difference:
    one, other = _ARRAY.search(was), _ARRAY.search(is_)
    if one is None or other is None:  # A static value.
        detail = f"{where}: {was} -> {is_}"
        return Difference(what=detail, detail=detail)
    aspects = [
        ("donation", was.startswith("donated "), is_.startswith("donated ")),
        ("weak type", one[1], other[1]),
        ("dtype", one[2], other[2]),
        ("shape", one[3], other[3]),
        ("sharding, layout or memory", was[one.end() :], is_[other.end() :]),
    ]
    changed = [name for name, before, after in aspects if before != after]
    if "weak type" in changed and other[1] and not other[3]:
        changed[changed.index("weak type")] = "weak type, as of a Python scalar"
    return Difference(what=f"{where}: {', '.join(changed)}", detail=f"{where}: {was} -> {is_}")
