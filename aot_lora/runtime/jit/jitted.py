"""`aot_lora.jit`: `jax.jit`, but for what a session makes of its calls."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection
from typing import Any

import jax

from aot_lora.errors import RecompileError
from aot_lora.runtime.jit import mode


class Jitted:
    """What `aot_lora.jit` returns; called and used like what `jax.jit` returns.

    Args:
      function: the Python function.
      program: its name in stores and locks; by default its module and qualified name.
      key: stands for what the function holds and that has no lasting text of its own.
      sources: names of further modules that its traces depend on.
      options: for `jax.jit`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        program: str | None,
        key: str,
        sources: Collection[str],
        options: dict[str, Any],
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.key = key
        self.sources = tuple(sources)
        self._options = options
        self.plain: Any = jax.jit(function, **options)
        self.program = program or self.qualified_name
        self._session: mode.Session | None = None
        self._call: Callable[..., Any] = self.plain

    @property
    def qualified_name(self) -> str:
        """Module and qualified name of the function, or of the one that it binds."""
        function: Any = self.function
        while isinstance(function, functools.partial):
            function = function.func
        name = getattr(function, "__qualname__", None) or type(function).__qualname__
        return f"{getattr(function, '__module__', None)}.{name}"

    def anew(self) -> Any:
        """Another `jax.jit` of the function, that shares nothing JAX holds in memory for this one.

        What JAX holds may come from its persistent cache: see `_jax_compat.without_cache`.
        """
        function = self.function

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        call.__name__ = getattr(self.plain, "__name__", call.__name__)
        return jax.jit(call, **self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session = mode.current()
        if session is not self._session:
            self._call = self.plain if session is None else session.bind(self)
            self._session = session
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "plain":  # Not made yet.
            raise AttributeError(name)
        return getattr(self.plain, name)

    def __repr__(self) -> str:
        return f"<aot_lora.jit of {self.qualified_name}>"

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s. Raises: RecompileError: the process only looks up."""
        self._refuse_when_replaying("trace")
        return self.plain.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As `jax.jit`'s. Raises: RecompileError: the process only looks up."""
        self._refuse_when_replaying("lower")
        return self.plain.lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """As `jax.jit`'s; what a session loaded stays loaded."""
        self._session, self._call = None, self.plain
        self.plain.clear_cache()

    def _refuse_when_replaying(self, verb: str) -> None:
        session = mode.current()
        if session is not None and session.replaying:
            raise RecompileError(
                f"refused to {verb} `{self.program}`",
                where=session.reason,
                expected="calls, which are looked up",
                next_step="call the function itself, or do this outside of the replay",
            )


def jit(
    function: Callable[..., Any] | None = None,
    /,
    *,
    program: str | None = None,
    key: str = "",
    sources: Collection[str] = (),
    **options: Any,
) -> Any:
    """`jax.jit` that can record its calls, and later only look them up.

    Outside of a session it is `jax.jit`. Inside of `recording` each call of a new kind is traced,
    compiled and stored, then run. Inside of `replay`, and with ``AOT_LORA_JIT`` in the environment
    (see `mode`), each call is looked up, without a trace; JAX's own C++ makes it from its second
    time on. Without a function it returns a decorator.

    Args:
      function: what to call. What it holds (closure, bound arguments, its object) is told apart by
        its text: see `key`. Module globals are not looked at: their sources are what counts.
      program: its name in stores and locks; by default its module and qualified name.
      key: where the function holds what has no lasting text, as a model object: a text that changes
        whenever what is traced would, for instance the digest of the model's config.
      sources: names of further modules that its traces depend on. The whole top-level package of
        the function counts always, and those of functions and classes that it holds or is given as
        static values; a single file counts with its neighbours.
      options: as of `jax.jit`: static_argnums, static_argnames, donate_argnums, donate_argnames,
        in_shardings, out_shardings, keep_unused, compiler_options, inline. Static values must be
        numbers, texts, enums, dtypes, functions, and tuples or frozen dataclasses of such.

    Raises:
      ProgramError: at a call in a session, which cannot be recorded: it names the reason.
      RecompileError: at a call in a replay that was not recorded; it names what differs.
    """
    if function is None:
        return functools.partial(jit, program=program, key=key, sources=sources, **options)
    return Jitted(function, program=program, key=key, sources=sources, options=options)
