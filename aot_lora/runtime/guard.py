"""The guard: while it stands, a compile anywhere in the process raises before XLA starts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from aot_lora._jax_compat import hooks, stack
from aot_lora._jax_compat.calls import calls_at_hand
from aot_lora.errors import RecompileError
from aot_lora.runtime import differences
from aot_lora.signature import Signature

Variants = Mapping[str, Signature]

_lock = threading.Lock()
_seals: list[tuple[str, Variants]] = []
_allowed: list[Allowed] = []
# (thread, reason) of each open `allow_compile`. The thread is kept because a context is copied
# into other threads (asyncio.to_thread), which stay sealed; a context and not a thread's local,
# because an asyncio task must not let the others through while it waits.
_passes: ContextVar[tuple[tuple[int, str], ...]] = ContextVar("aot_lora_allow_compile", default=())


class Allowed(NamedTuple):
    """A compile that `allow_compile` let through a seal, and how long it took."""

    function: str
    reason: str
    seconds: float


def seal(reason: str, variants: Variants | None = None) -> None:
    """Forbids compiling in this process until `unseal` is called with the same reason.

    Holds for `jax.jit`, for eager operations that would compile, and for `.lower().compile()`.

    Args:
      reason: who seals, for the error's text.
      variants: what is warmed, by variant name: an error names the nearest. Dropped by `unseal`.
    """
    with _lock:
        _seals.append((reason, variants or {}))
        if len(_seals) == 1:
            hooks.add_compile_hook(_guard)


def unseal(reason: str) -> None:
    """Takes back one `seal`; compiling is allowed again once none is left."""
    with _lock:
        del _seals[[name for name, _ in _seals].index(reason)]
        if not _seals:
            hooks.remove_compile_hook(_guard)


@contextmanager
def forbid_compile(reason: str = "forbid_compile()") -> Generator[None]:
    """Raises `RecompileError` for any compile inside the block, in any thread.

    What JAX holds compiled in memory still runs: only work for the compiler is refused. The error
    names what differs from the nearest call that was compiled before.
    """
    seal(reason)
    try:
        yield
    finally:
        unseal(reason)


@contextmanager
def allow_compile(reason: str) -> Generator[None]:
    """Lets this thread compile inside the block, through every seal: for the one place that must.

    Other threads stay sealed. `allowed` lists what was let through.

    Args:
      reason: why it must, for whoever reads that list.

    Raises:
      ValueError: no reason is given.
    """
    if not isinstance(reason, str) or not reason.strip():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("allow_compile needs a reason: say why this place must compile")
    token = _passes.set((*_passes.get(), (threading.get_ident(), reason)))
    try:
        yield
    finally:
        _passes.reset(token)


def allowed() -> tuple[Allowed, ...]:
    """The compiles that `allow_compile` let through a seal since the process started, in order."""
    with _lock:
        return tuple(_allowed)


def is_allowed() -> bool:
    """Whether this thread is inside of an `allow_compile`."""
    return any(thread == threading.get_ident() for thread, _ in _passes.get())


def _guard(
    inner: Callable[..., Any], backend: Any, computation: Any, *rest: Any, **named: Any
) -> Any:
    __tracebackhide__ = True  # pytest shows the caller's line instead
    here = threading.get_ident()
    reasons = [reason for thread, reason in _passes.get() if thread == here]
    if not reasons:
        raise _refusal(computation)
    start = time.perf_counter()
    executable = inner(backend, computation, *rest, **named)
    seconds = time.perf_counter() - start
    function = hooks.computation_text(computation)[0].removeprefix("jit_")
    with _lock:
        _allowed.append(Allowed(function, reasons[-1], seconds))
    return executable


def _refusal(computation: Any) -> RecompileError:
    with _lock:
        seals = list(_seals)
    reason = seals[-1][0] if seals else None
    try:
        return _explained(reason, seals)
    except Exception:  # Whatever JAX has moved: the refusal itself must still be what is raised.
        pass
    name, arguments = hooks.computation_text(computation)
    return RecompileError(
        f"refused to compile `{name}`",
        where=reason,
        expected=_NOTHING,
        found=f"a compile for arguments ({', '.join(arguments)})",
        next_step=_NEXT,
    )


_TOLD = 8  # differences; a wrong batch size may reach hundreds of arguments
_NOTHING = "only lookups of warmed executables"
_NEXT = "warm this shape up, or do the work in numpy before the device sees it"
_NEXT_BY_KIND = {
    "Python scalar": "pass an array of that dtype, as np.float32(0.5), instead of a Python scalar",
    "numpy cast": "cast it in numpy, as np.asarray(x, np.float32), before the device sees it",
    "weak type": "give it a dtype where it is made: jnp.asarray(x, dtype), np.float32(0.5)",
    "static": "warm this value up, or pass it as an array",
    "tree": "pass the containers that were warmed, or warm these up",
    "commitment": "put it where it was: jax.device_put(x, device), or no device_put at all",
    "sharding": "put it where it was: jax.device_put(x, sharding)",
    "donation": "use one jax.jit of this function everywhere",
    "option": "set JAX's options and contexts before warming up, and leave them",
    "function": "define and jit the function once, outside the loop or the call",
}


def _explained(reason: str | None, seals: list[tuple[str, Variants]]) -> RecompileError:
    call, earlier = calls_at_hand()
    if call is None:
        raise LookupError("no call on the stack")
    place, eager = stack.caller()
    name = f"`{call.function}`"
    if call.place and not stack.is_jax(call.place):
        name += f" ({stack.short_path(call.place)})"
    elif eager and eager != call.function:
        name += f" for `{eager}`"
    variants = [item for _, known in reversed(seals) for item in known.items()]
    near = differences.nearest(call, variants, earlier)
    if near is None:
        expected = _NOTHING
        found = f"a compile for {differences.arguments_text(call)}; nothing by this name was "
        found += "warmed or compiled before" if variants else "compiled before"
        next_step = _NEXT
    else:
        told = [difference.text.partition(": ")[0] for difference in near.differences]
        shown = differences.arguments_text(near.expected, told)
        if near.variant:
            whose = near.expected.function
            whose = "" if whose == call.function else f", of `{whose}`"
            expected = f"as warmed: {shown} (nearest variant `{near.variant}`{whose})"
        else:
            expected = f"as compiled before: {shown}"
        found = "; ".join(difference.text for difference in near.differences[:_TOLD])
        if len(near.differences) > _TOLD:
            found += f"; and {len(near.differences) - _TOLD} more"
        next_step = _NEXT_BY_KIND.get(near.differences[0].kind, _NEXT) if found else ""
        if found and near.expected.trace is not None and near.expected.trace is call.trace:
            found += "; traced before, only the executable is new"
        if not found and near.variant:
            found = "the same arguments, but a call of JAX's own jit, not of the stored executable"
            next_step = "call what Runtime.lookup returns"
        elif not found:
            found = "the same arguments; JAX has dropped what it had compiled, or never kept it"
            next_step = "compile it again before the seal; see jax.clear_caches"
    where = ", ".join(filter(None, [reason, place and f"called from {place}"]))
    return RecompileError(
        f"refused to compile {name}",
        where=where or None,
        expected=expected,
        found=found,
        next_step=next_step,
    )
