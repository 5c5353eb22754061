"""The guard: while it stands, a compile anywhere in the process raises before XLA starts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from aot_lora import _jax_compat
from aot_lora.errors import RecompileError

_lock = threading.Lock()
_reasons: list[str] = []
_compile: Callable[..., Any] | None = None


def seal(reason: str) -> None:
    """Forbids compiling in this process until `unseal` is called with the same reason.

    Holds for `jax.jit`, for eager operations that would compile, and for `.lower().compile()`.

    Args:
      reason: who seals, for the error's text.
    """
    global _compile
    with _lock:
        _reasons.append(reason)
        if _compile is None:
            _compile = _jax_compat.compile_hook()
            _jax_compat.set_compile_hook(_refuse)


def unseal(reason: str) -> None:
    """Takes back one `seal`; compiling is allowed again once none is left."""
    global _compile
    with _lock:
        _reasons.remove(reason)
        if not _reasons and _compile is not None:
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


def _refuse(backend: Any, computation: Any, *rest: Any, **named: Any) -> Any:
    del backend, rest, named
    name, arguments = _jax_compat.computation_text(computation)
    raise RecompileError(
        f"refused to compile `{name}`",
        where=", ".join(_reasons[-1:]) or None,
        expected="only lookups of warmed executables",
        found=f"a compile for arguments ({', '.join(arguments)})",
        next_step="warm this shape up, or do the work in numpy before the device sees it",
    )
