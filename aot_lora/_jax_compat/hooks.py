"""Compiles on their way to XLA: functions that are called in the place of JAX's own."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from jax._src import compiler

Hook = Callable[..., Any]
"""Called with (inner, backend, computation, ...): calls ``inner(backend, computation, ...)``, which
returns the executable, or raises."""

_lock = threading.Lock()
_hooks: list[Hook] = []
_jax_own: Callable[..., Any] | None = None
_xla_own: Callable[..., Any] | None = None
_ran = threading.local()


def compile_function() -> Callable[..., Any]:
    """The one function through which every compile of the process passes, on its way to XLA."""
    return compiler.compile_or_get_cached


def add_compile_hook(hook: Hook) -> None:
    """Puts a hook in the way, outside of those that are there."""
    global _jax_own
    with _lock:
        _hooks.append(hook)
        if _jax_own is None:
            _jax_own = compiler.compile_or_get_cached
            compiler.compile_or_get_cached = _through


def remove_compile_hook(hook: Hook) -> None:
    """Takes it away again, in any order; JAX's own function is back once none is left."""
    global _jax_own
    with _lock:
        _hooks.remove(hook)
        # Where somebody else has wrapped `_through` it has to stay.
        if not _hooks and compiler.compile_or_get_cached is _through:
            compiler.compile_or_get_cached = _jax_own
            _jax_own = None


@contextmanager
def compile_hook(hook: Hook) -> Generator[None]:
    """A hook for the length of a block."""
    add_compile_hook(hook)
    try:
        yield
    finally:
        remove_compile_hook(hook)


def _through(backend: Any, computation: Any, *rest: Any, **named: Any) -> Any:
    __tracebackhide__ = True  # pytest shows the caller's line instead
    # Another thread may have removed the last hook just now: then JAX's function is back in place.
    inner = _jax_own or compiler.compile_or_get_cached
    for hook in tuple(_hooks):
        inner = partial(hook, inner)
    return inner(backend, computation, *rest, **named)


def count_xla_runs() -> None:
    """From here on `xla_runs` tells a compile from a hit of JAX's persistent cache."""
    global _xla_own
    with _lock:
        if _xla_own is None:
            _xla_own = compiler.backend_compile_and_load
            compiler.backend_compile_and_load = _run_xla


def _run_xla(*args: Any, **named: Any) -> Any:
    assert _xla_own is not None
    _ran.count = xla_runs() + 1
    return _xla_own(*args, **named)


def xla_runs() -> int:
    """How often this thread has run XLA's compiler since `count_xla_runs`."""
    return getattr(_ran, "count", 0)


def computation_text(computation: Any) -> tuple[str, tuple[str, ...]]:
    """The name and the argument types of a module on its way to XLA."""
    name = str(computation.operation.attributes["sym_name"]).strip('"')
    for operation in computation.body.operations:
        if operation.name in ("main", '"main"') or str(operation.name).strip('"') == "main":
            return name, tuple(_type_text(kind) for kind in operation.type.inputs)
    return name, ()


def _type_text(kind: Any) -> str:
    text = str(kind).removeprefix("tensor<").removesuffix(">")
    *sizes, dtype = text.split("x")
    return f"{dtype}[{','.join(sizes)}]"
