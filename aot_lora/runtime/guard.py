"""The guard: while it stands, a compile anywhere in the process raises before XLA starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from aot_lora import _jax_compat
from aot_lora.errors import RecompileError
from aot_lora.signature import Signature

Variants = Mapping[str, Signature]


class Allowed(NamedTuple):
    """A compile that `allow_compile` let through."""

    function: str
    reason: str
    seconds: float


_lock = threading.Lock()
_seals: list[tuple[str, Variants]] = []
_compile: Callable[..., Any] | None = None
_open = threading.local()
_allowed: list[Allowed] = []


def seal(reason: str, variants: Variants | None = None) -> None:
    """Forbids compiling in this process until `unseal` is called with the same reason.

    Holds for `jax.jit`, for eager operations that would compile, and for `.lower().compile()`.

    Args:
      reason: who seals, for the error's text.
      variants: signatures of what is warmed, by name; an error names the nearest one.
    """
    global _compile
    with _lock:
        _seals.append((reason, variants or {}))
        if _compile is None:
            _compile = _jax_compat.compile_hook()
            _jax_compat.set_compile_hook(_guarded)


def unseal(reason: str) -> None:
    """Takes back one `seal`; compiling is allowed again once none is left."""
    global _compile
    with _lock:
        _seals.remove(next(found for found in _seals if found[0] == reason))
        if not _seals and _compile is not None:
            _jax_compat.set_compile_hook(_compile)
            _compile = None


@contextmanager
def forbid_compile(reason: str = "forbid_compile()") -> Generator[None]:
    """Raises `RecompileError` for any compile inside the block, in any thread.

    What JAX holds compiled in memory still runs: only work for the compiler is refused.
    """
    seal(reason)
    try:
        yield
    finally:
        unseal(reason)


@contextmanager
def allow_compile(reason: str) -> Generator[None]:
    """Lets compiles of this thread through inside the block: for the one place that must.

    Other threads stay sealed. Each compile is noted; `allowed()` lists them.

    Args:
      reason: why it must, for the note.

    Raises:
      ValueError: no reason is given.
    """
    if not reason.strip():
        raise ValueError("allow_compile() needs a reason")
    before = getattr(_open, "reason", None)
    _open.reason = reason
    try:
        yield
    finally:
        _open.reason = before


def allowed() -> tuple[Allowed, ...]:
    """Every compile that `allow_compile` has let through a seal, in order."""
    return tuple(_allowed)


def _guarded(backend: Any, computation: Any, *rest: Any, **named: Any) -> Any:
    reason, inner = getattr(_open, "reason", None), _compile
    if reason is None or inner is None:
        raise _refusal(computation)
    began = time.perf_counter()
    result = inner(backend, computation, *rest, **named)
    function = _jax_compat.computation_text(computation)[0]
    _allowed.append(Allowed(function, reason, time.perf_counter() - began))
    return result


def _refusal(computation: Any) -> RecompileError:
    name, arguments = _jax_compat.computation_text(computation)
    reason, variants = _seals[-1] if _seals else (None, {})
    nearest = _nearest(name.removeprefix("jit_"), arguments, variants)
    return RecompileError(
        f"refused to compile `{name}`",
        where=reason,
        expected="only lookups of warmed executables" + (nearest and f"; nearest is {nearest}"),
        found=f"a compile for arguments ({', '.join(arguments)})",
        next_step="warm this shape up, or do the work in numpy before the device sees it",
    )


def _nearest(function: str, arguments: tuple[str, ...], variants: Variants) -> str:
    """The warmed variant of this function with the fewest other arguments, and which those are."""
    best: list[str] | None = None
    text = ""
    for name, signature in variants.items():
        if signature.function != function:
            continue
        kept = [signature.inputs[index] for index in signature.kept]
        if len(kept) != len(arguments):
            differs = [f"it takes {len(kept)} arguments"]
        else:
            pairs = zip(kept, arguments, strict=True)
            differs = [
                f"{spec.name} was {spec}, now {found}"
                for spec, found in pairs
                if str(spec).removeprefix("~") != found
            ]
        if best is None or len(differs) < len(best):
            best, text = differs, f"`{name}`: {'; '.join(differs) or 'of the same arguments'}"
    return text
