"""What tells one call of a function from another, in words; and the nearest of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import zip_longest
from math import log

from aot_lora._jax_compat.calls import (
    Argument,
    Call,
    call_of_signature,
    keywords,
    tree_differences,
)
from aot_lora.signature import ArraySpec, Signature

# So many come into the last round of `nearest`, where each difference is spelled out.
_FINALISTS = 16
_SHOWN = 8
_MAX_VALUE_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One difference: its kind, one of the words in `compare`, and the line that says it."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearest:
    """What a call comes closest to. `variant`: its name in the store; empty for an earlier call."""

    expected: Call
    differences: tuple[Difference, ...]
    variant: str = ""


def differences(expected: Signature | Call, found: Call) -> tuple[str, ...]:
    """The differences between a call and what is compiled, one readable line each.

    Args:
      expected: the signature of a stored executable, or an earlier call.
      found: the call; `calls.call_of` describes one.

    Returns:
      Nothing where the call fits.
    """
    return tuple(difference.text for difference in compare(expected, found))


def compare(expected: Signature | Call, found: Call) -> tuple[Difference, ...]:
    """As `differences`, each with its kind: function, tree, static, shape, dtype, weak type,
    Python scalar, numpy cast, sharding, commitment, donation, option, result."""
    stored = isinstance(expected, Signature)
    base = call_of_signature(expected) if stored else expected
    lines = [*_static(base, found, stored), *_arguments(base, found, stored)]
    if not stored:
        lines += _options(base, found)
    if not lines and not stored:
        lines += _last_resort(base, found)
    return tuple(Difference(kind=kind, text=text) for kind, text in lines)


def nearest(
    found: Call, variants: Iterable[tuple[str, Signature]], earlier: Iterable[Call]
) -> Nearest | None:
    """The variant or earlier call with the fewest differences.

    The same function's go before another's, then the closest sizes, then the first. Another
    function's variants count only if they take arguments of the same names.
    """
    names = [argument.spec.name for argument in found.arguments]
    specs = [argument.spec for argument in found.arguments]
    ranked: list[tuple[tuple[float, ...], str, Signature | Call]] = []
    for variant, signature in variants:
        other = signature.function != found.function
        if other and (not names or [spec.name for spec in signature.inputs] != names):
            continue
        ranked.append(((other, *_distance(signature.inputs, specs)), variant, signature))
    for call in earlier:
        distance = _distance([argument.spec for argument in call.arguments], specs)
        ranked.append(((False, *distance), "", call))
    best: list[tuple[tuple[float, ...], str, Nearest]] = []
    for rank, variant, expected in nsmallest(_FINALISTS, ranked, key=lambda entry: entry[0]):
        lines = compare(expected, found)
        call = call_of_signature(expected) if isinstance(expected, Signature) else expected
        # Another sharding is closer than none. JAX keeps its calls in no order, so text decides.
        unplaced = sum(line.kind == "commitment" for line in lines)
        text = "" if variant else arguments_text(call)
        near = Nearest(expected=call, differences=lines, variant=variant)
        best.append(((rank[0], len(lines), unplaced, rank[2], not variant), text, near))
    return min(best, key=lambda entry: entry[:2])[2] if best else None


def arguments_text(call: Call, only: Iterable[str] = ()) -> str:
    """``x: f32[16,64], scale: f32[]``, with the static values; shortened to `only` where long."""
    shown = [
        (a.spec.name, f"{a.spec.name}: {f'a {a.kind}' if a.kind else a.spec}")
        for a in call.arguments
    ]
    shown += [(name, f"{name}={_short(value)}") for name, value in (call.static or {}).items()]
    chosen = shown
    if len(shown) > _SHOWN:
        chosen = ([line for line in shown if line[0] in set(only)] or shown)[:_SHOWN]
    more = [f"and {len(shown) - len(chosen)} more"] if len(shown) > _SHOWN else []
    return ", ".join([*(text for _, text in chosen), *more]) or "no arguments"


def _distance(expected: Sequence[ArraySpec], found: Sequence[ArraySpec]) -> tuple[int, float]:
    """How many arguments differ, and by how much in size. Cheap: a plan has a thousand variants."""
    count, size = abs(len(expected) - len(found)), 0.0
    for was, now in zip(expected, found, strict=False):
        if was.shape != now.shape:
            count += 1
            for a, b in zip_longest(was.shape, now.shape, fillvalue=0):
                if a != b:
                    size += abs(log((a + 1) / (b + 1)))
        elif was.dtype != now.dtype or was.weak_type != now.weak_type:
            count += 1
    return count, size


def _static(expected: Call, found: Call, stored: bool) -> Iterator[tuple[str, str]]:
    if found.static is None:
        return
    for name, value in found.static.items():
        if stored:
            yield "static", f"{name}: static value {_short(value)}, a variant has its own built in"
        elif expected.static is None:
            pass
        elif name not in expected.static:
            yield "static", f"{name}: static value {_short(value)}, was not given"
        elif not _same(expected.static[name], value):
            yield (
                "static",
                f"{name}: static value {_short(value)}, was {_short(expected.static[name])}",
            )
    for name, value in (expected.static or {}).items():
        if name not in found.static:
            yield "static", f"{name}: static value not given, was {_short(value)}"


def _arguments(expected: Call, found: Call, stored: bool) -> Iterator[tuple[str, str]]:
    was, now = expected.arguments, found.arguments
    alike = len(was) == len(now)
    if expected.tree is not None and found.tree is not None:
        alike = expected.tree == found.tree
    if alike:  # Names may differ then: another function's, or the same one renamed.
        for a, b in zip(was, now, strict=True):
            yield from _argument(a, b, stored)
        return
    before = {argument.spec.name: argument for argument in was}
    after = {argument.spec.name: argument for argument in now}
    for name, argument in after.items():
        if name in before:
            yield from _argument(before[name], argument, stored)
        else:
            yield "tree", f"{name}: {argument.spec}, was not there"
    for name, argument in before.items():
        if name not in after:
            yield "tree", f"{name}: not there, was {argument.spec}"
    if before.keys() == after.keys():
        yield from _tree(expected, found)


def _tree(expected: Call, found: Call) -> Iterator[tuple[str, str]]:
    """The same names in other containers."""
    was, now = keywords(expected.tree), keywords(found.tree)
    for name in now:
        if name not in was:
            yield "tree", f"{name}: passed by keyword, was by position"
    for name in was:
        if name not in now:
            yield "tree", f"{name}: passed by position, was by keyword"
    for top, path, is_now, before in tree_differences(expected.tree, found.tree):
        if top is None:
            if was == now:
                yield "tree", f"the arguments: {is_now}, was {before}"
            continue
        by_keyword, key = top
        root = str(key) if by_keyword else _root(found, key)
        yield "tree", f"{root}{path}: {is_now}, was {before}"


def _root(call: Call, position: int) -> str:
    """The name of an argument by position, from the names of the leaves in it."""
    count = 0
    for number, child in enumerate(call.tree.children()[0].children()):
        if number == position and child.num_leaves:
            name = call.arguments[count].spec.name
            cut = min(name.find(mark) % (len(name) + 1) for mark in "[.")
            return name[:cut]
        count += child.num_leaves
    return f"argument {position}"


def _argument(was: Argument, now: Argument, stored: bool) -> Iterator[tuple[str, str]]:
    name, before, after = now.spec.name, was.spec, now.spec
    parts: list[tuple[str, str]] = []
    if before.shape != after.shape:
        parts.append(("shape", f"shape was [{','.join(map(str, before.shape))}]"))
    if before.dtype != after.dtype:
        parts.append(("dtype", f"dtype was {ArraySpec(shape=(), dtype=before.dtype)}"[:-2]))
    if after.weak_type and not before.weak_type:
        parts.append(("weak type", "was not weakly typed"))
    if before.weak_type and not after.weak_type:
        parts.append(("weak type", "was weakly typed, as a Python scalar is"))
    if now.kind.startswith("Python ") and parts:
        yield "Python scalar", f"{name}: a {now.kind}, was {_array(before)}"
    elif now.kind.startswith("numpy ") and (parts or stored):
        what = "array" if after.shape else "scalar"
        cast = f"a {now.kind} {what}, silently cast to {after}"
        yield "numpy cast", f"{name}: {cast}, was {_array(before)}"
    elif parts:
        yield parts[0][0], f"{name}: {after}, {', '.join(text for _, text in parts)}"
    yield from _placement(was, now, stored)
    if was.donated != now.donated and not stored:
        yield "donation", f"{name}: {'donated, was not' if now.donated else 'not donated, was'}"


def _placement(was: Argument, now: Argument, stored: bool) -> Iterator[tuple[str, str]]:
    name = now.spec.name
    if stored:
        if now.elsewhere:
            kind = "sharding" if " over " in now.sharding else "commitment"
            yield kind, f"{name}: committed to {now.sharding}, was for this host's first device"
    elif was.committed is None or now.committed is None:
        return
    elif was.committed and now.committed:
        if was.sharding != now.sharding:
            yield "sharding", f"{name}: sharding {now.sharding}, was {was.sharding}"
    elif now.committed:
        yield "commitment", f"{name}: committed to {now.sharding}, was uncommitted"
    elif was.committed:
        yield "commitment", f"{name}: uncommitted, was committed to {was.sharding}"


def _options(expected: Call, found: Call) -> Iterator[tuple[str, str]]:
    for was, now in ((expected.options, found.options), (expected.context, found.context)):
        if was is None or now is None:
            continue
        for name in {**was, **now}:
            before, after = was.get(name), now.get(name)
            # A tuple has one entry per argument or result: if those differ, that is said already.
            lengths = {len(value) if isinstance(value, tuple) else 0 for value in (before, after)}
            if len(lengths) == 1 and not _same(before, after):
                yield "option", f"{name}: {_short(after)}, was {_short(before)}"


def _last_resort(expected: Call, found: Call) -> Iterator[tuple[str, str]]:
    """For calls that are alike: what the function holds must differ."""
    if expected.results != found.results and expected.results and found.results:
        now, was = ", ".join(found.results), ", ".join(expected.results)
        yield "result", f"same arguments, but the result: {now}, was {was}"
    elif None not in (found.wrapped, expected.wrapped) and found.wrapped is not expected.wrapped:
        yield "function", "the function is a new object: defined, bound or wrapped again"


def _array(spec: ArraySpec) -> str:
    if spec.weak_type:
        return f"weakly typed {spec}, as a Python scalar is"
    return f"{'a' if str(spec)[0] in 'bcpu' else 'an'} {spec} array"


def _same(a: object, b: object) -> bool:
    """JAX's own idea of it, without trusting a user's `==` to give a bool."""
    if a is b:
        return True
    try:
        return type(a) is type(b) and bool(a == b)
    except Exception:
        return False


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[: _MAX_VALUE_CHARS - 3] + "..."
