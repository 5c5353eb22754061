"""Replaying: calls are looked up among what was recorded; nothing is traced or compiled."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any

from aot_lora._jax_compat.dispatch import Given, dispatcher
from aot_lora._jax_compat.placement import load_at
from aot_lora.errors import IntegrityError, RecompileError
from aot_lora.plan import usable_cores
from aot_lora.runtime import differences, guard
from aot_lora.runtime.jit import mode
from aot_lora.runtime.jit.calls import FORMAT, Function, made_call, readable, recorded_call
from aot_lora.runtime.jit.jitted import Jitted
from aot_lora.signature import Signature
from aot_lora.store import Entry, LocalStore
from aot_lora.store.coverage import check_header
from aot_lora.store.key import shorten
from aot_lora.store.recordings import find_recording
from aot_lora.targets.host import this_host

_TOLD = 8  # differences; a wrong batch size may reach hundreds of arguments


class Replay:
    """An open replay; closes itself at the end of a ``with`` block.

    Args:
      name: of the recording.
      store: its folder; by default that of `mode.store_root`.
      seal: whether any compile in the process is refused, eager operations' too.
    """

    replaying = True

    def __init__(
        self, name: str, store: str | os.PathLike[str] | None = None, *, seal: bool = True
    ) -> None:
        self.name = mode.checked_name(name)
        self.store = LocalStore(mode.store_root(store))
        self.reason = f"replay of recording `{name}`"
        self._seal = seal
        self._loaded: dict[str, Any] = {}
        self._signatures: dict[str, Signature] = {}

    def open(self) -> None:
        """Checks and loads everything that was recorded, then seals the process.

        Raises:
          CoverageError: the store has no such recording that fits this process.
          IntegrityError: an artifact is missing or damaged.
        """
        _, target_parts = this_host()
        own = {"recording": self.name, "call format": str(FORMAT)}
        entries = find_recording(self.store, self.name, {**own, **target_parts}).entries
        expected = shorten(target_parts)
        with ThreadPoolExecutor(usable_cores() + 1, thread_name_prefix="aot-lora-load") as threads:
            loads = threads.map(lambda entry: self._load(entry, expected), entries)
            for entry, (signature, loaded) in zip(entries, loads, strict=True):
                self._signatures[entry.variant] = signature
                self._loaded[signature.call] = loaded
        mode.enter(self)
        if self._seal:
            guard.seal(self.reason, self._signatures)

    def _load(self, entry: Entry, expected: Mapping[str, str]) -> tuple[Signature, Any]:
        artifact = self.store.read_entry(entry)
        where = str(self.store.artifact_path(entry.key))
        check_header(artifact.header, expected, where=where)
        signature = artifact.header.signature
        if signature.placement is None or not signature.call:
            raise IntegrityError("the artifact is of no recorded call", where=where)
        return signature, load_at(artifact.raw(), signature, signature.placement)

    def close(self) -> None:
        """Ends: calls are plain `jax.jit` again, and compiling is allowed."""
        mode.leave(self)
        if self._seal:
            guard.unseal(self.reason)

    def __enter__(self) -> Replay:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the recorded calls."""
        return tuple(self._signatures)

    def bind(self, jitted: Jitted) -> Callable[..., Any]:
        """What looks up the calls of a function."""
        function = Function(jitted)

        def find(given: Given) -> Any:
            text = function.text(given)
            found = self._loaded.get(text)
            if found is None and not guard.is_allowed():
                raise self._refusal(jitted, text, given)
            return found

        return dispatcher(jitted.plain, find)

    def _refusal(self, jitted: Jitted, text: str, given: Given) -> RecompileError:
        own = [
            (variant, signature)
            for variant, signature in self._signatures.items()
            if variant.rpartition("/")[0] == jitted.program
        ]
        head = f"refused to trace `{jitted.program}`"
        step = f"make this call in the warm-up, and record again: AOT_LORA_JIT=record:{self.name}"
        if not own:
            return RecompileError(
                head,
                where=self.reason,
                expected="a call that was recorded",
                found="no call of this program was",
                next_step=step,
            )
        recorded = [(variant, signature, recorded_call(signature)) for variant, signature in own]
        made = made_call(text, given, own[0][1].function)
        near = differences.nearest(made, (), [call for _, _, call in recorded])
        assert near is not None
        variant, signature = next((v, s) for v, s, call in recorded if call is near.expected)
        told = [difference.text for difference in near.differences]
        more = [f"and {len(told) - _TOLD} more"] if len(told) > _TOLD else []
        return RecompileError(
            head,
            where=self.reason,
            expected=f"as recorded: {readable(signature)} (nearest variant `{variant}`)",
            found="; ".join([*told[:_TOLD], *more]) or "a call that differs in its program's text",
            next_step=step,
        )


def replay(name: str, store: str | os.PathLike[str] | None = None, *, seal: bool = True) -> Replay:
    """Makes the calls of `aot_lora.jit` functions from a recording, without a trace.

    Everything is checked and loaded at once. A call that was not recorded raises `RecompileError`
    before JAX looks at the function, but for one inside of `allow_compile`.

    Args:
      name: of the recording.
      store: a folder; by default that of ``AOT_LORA_CACHE``, else the platform's default.
      seal: also refuse any compile in the process, as `forbid_compile` does, eager operations
        included.

    Returns:
      The open replay: a context manager, or to be closed by `close`.

    Raises:
      ConfigError: a session is open already.
      CoverageError: no recording of this name fits this process's sources, versions and devices.
      IntegrityError: an artifact is missing or damaged.
    """
    session = Replay(name, store, seal=seal)
    session.open()
    return session
