"""Which session calls of `aot_lora.jit` belong to; the environment may name one.

``AOT_LORA_JIT`` is read at the first call:

    record:NAME   record from here on; what was recorded is readable at any time
    replay:NAME   look up what NAME recorded; other work of JAX compiles as ever
    sealed:NAME   look up, and refuse any compile in the process

The store is that of ``AOT_LORA_CACHE``, else the default one.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from aot_lora.errors import ConfigError

VARIABLE = "AOT_LORA_JIT"


class Session(Protocol):
    """What makes the calls of jitted functions.

    `replaying`: it only looks up. `reason`: what it is, for errors.
    """

    replaying: bool
    reason: str

    def bind(self, jitted: Any) -> Callable[..., Any]:
        """What to call instead of the plain `jax.jit`."""
        ...


class _State:
    session: Session | None = None
    read = False  # the environment


_lock = threading.RLock()


def current() -> Session | None:
    """The open session, or None for plain `jax.jit`.

    Raises:
      ConfigError: the environment names no session; CoverageError and others: as `replay`.
    """
    return _State.session if _State.read else _read_environment()


def enter(session: Session) -> None:
    """Opens a session for the whole process; the environment is not asked any more.

    Raises:
      ConfigError: another one is open.
    """
    with _lock:
        if _State.session is not None:
            raise ConfigError(
                "a session of aot_lora.jit is open already",
                where=session.reason,
                found=_State.session.reason,
                next_step="close it first",
            )
        _State.session, _State.read = session, True


def leave(session: Session) -> None:
    """Closes a session: calls are plain `jax.jit` again."""
    with _lock:
        if _State.session is session:
            _State.session = None


def store_root(store: str | os.PathLike[str] | None) -> Path:
    """The store: as given, then ``AOT_LORA_CACHE``, then the default of this platform."""
    chosen = store or os.environ.get("AOT_LORA_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    from aot_lora.config.presets import default_store_root  # Loads all that configs need.

    return default_store_root()


def checked_name(name: str) -> str:
    """The name of a recording.

    Raises:
      ConfigError: it would not do for a file.
    """
    if not re.fullmatch(r"[\w.-]+", name):
        raise ConfigError(
            "not a name for a recording", expected="letters, digits, _ . -", found=repr(name)
        )
    return name


def _read_environment() -> Session | None:
    with _lock:
        if _State.read:
            return _State.session
        value = os.environ.get(VARIABLE, "")
        verb, _, name = value.partition(":")
        if not value:
            _State.read = True
        elif verb == "record" and name:
            from aot_lora.runtime.jit.recorder import Recording

            Recording(name, eager_manifest=True).open()
        elif verb in ("replay", "sealed") and name:
            from aot_lora.runtime.jit.replayer import Replay

            Replay(name, seal=verb == "sealed").open()
        else:
            raise ConfigError(
                f"{VARIABLE} is not understood",
                where="environment",
                expected="record:NAME, replay:NAME or sealed:NAME",
                found=repr(value),
                next_step=f"set it to one of these, or unset {VARIABLE}",
            )
        return _State.session
