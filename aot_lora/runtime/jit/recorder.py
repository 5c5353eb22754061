"""Recording: each new kind of call is traced, compiled and stored, then loaded and run."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from aot_lora import _jax_compat
from aot_lora._jax_compat.dispatch import Given, dispatcher, refuse_held_arrays
from aot_lora._jax_compat.placement import load_at, placement_of
from aot_lora.errors import CheckFailed, ProgramError
from aot_lora.lowering.compare import Comparison, compare
from aot_lora.lowering.lock import LockLine, dump_lock, read_lock
from aot_lora.lowering.trace import Lowering, lower, prepare_tracing
from aot_lora.programs.modules import module_digests, tops
from aot_lora.runtime.jit import mode
from aot_lora.runtime.jit.calls import FORMAT, Function, readable, variant_name
from aot_lora.runtime.jit.jitted import Jitted
from aot_lora.signature import Signature
from aot_lora.store import Entry, LocalStore, Manifest
from aot_lora.store.keep import keep
from aot_lora.store.key import key_of
from aot_lora.store.manifest import FORMAT as MANIFEST_FORMAT
from aot_lora.store.recordings import title
from aot_lora.targets.host import this_host

_LOCATIONS = "jax_traceback_in_locations_limit"


class Recording:
    """An open recording.

    Args:
      name: of the recording.
      store: its folder; by default that of `mode.store_root`.
      lock: where the lock is written; by default ``recordings/NAME.lock.json`` in the store.
      eager_manifest: whether the manifest is written after each new call, for a process whose end
        nobody waits for, rather than at the end.
    """

    replaying = False

    def __init__(
        self,
        name: str,
        store: str | os.PathLike[str] | None = None,
        *,
        lock: str | os.PathLike[str] | None = None,
        eager_manifest: bool = False,
    ) -> None:
        self.name = mode.checked_name(name)
        self.store = LocalStore(mode.store_root(store))
        default = self.store.root / "recordings" / f"{name}.lock.json"
        self.lock = Path(lock) if lock is not None else default
        self.reason = f"recording `{name}`"
        self.traced = 0
        self.compiled = 0
        self._eager = eager_manifest
        self._functions: list[Function] = []
        self._loaded: dict[str, Any] = {}
        self._entries: dict[str, Entry] = {}
        self._lines: dict[str, LockLine] = {}
        self._building = threading.Lock()
        self._limit: Any = None

    @property
    def variants(self) -> tuple[str, ...]:
        """Names of the recorded calls, in the order of their first."""
        return tuple(self._entries)

    def open(self) -> None:
        """Begins: from here on calls are recorded."""
        self.target, self._target_parts = this_host()
        self._limit = getattr(jax.config, _LOCATIONS)
        mode.enter(self)
        prepare_tracing()

    def close(self, *, write: bool = True) -> None:
        """Ends; writes the manifest and the lock unless told not to."""
        mode.leave(self)
        jax.config.update(_LOCATIONS, self._limit)
        if write:
            self.write()

    def bind(self, jitted: Jitted) -> Callable[..., Any]:
        """What records the calls of a function."""
        function = Function(jitted)
        self._functions.append(function)
        return dispatcher(jitted.plain, lambda given: self._find(function, given))

    def _find(self, function: Function, given: Given) -> Any:
        text = function.text(given)
        with self._building:
            if text not in self._loaded:
                self._loaded[text] = self._build(function.jitted, text, given)
                if self._eager:
                    self.write()
            return self._loaded[text]

    def _build(self, jitted: Jitted, text: str, given: Given) -> Any:
        name = variant_name(text, self._entries)
        found = lower(
            lambda: refuse_held_arrays(jitted.anew().trace(*given.args, **given.kwargs)),
            platform=self.target.platform,
            where=name,
            own_nodes=True,
        )
        self.traced += 1
        parts = {
            "fingerprint": found.fingerprint,
            "signature": f"{found.signature} kept {found.signature.kept}",
            "call": text,
            **self._target_parts,
        }
        with self.store.writing():
            kept = keep(self.store, name, parts, lambda: _compile(name, text, found))
            self.compiled += kept.compiled
            artifact = self.store.read_entry(kept.entry)
        signature = artifact.header.signature
        assert signature.placement is not None
        loaded = load_at(artifact.raw(), signature, signature.placement)
        self._entries[name] = kept.entry
        self._lines[name] = LockLine(
            fingerprint=found.fingerprint,
            signature=readable(signature),
            kernels=found.code.kernels,
        )
        return loaded

    def _parts(self) -> dict[str, str]:
        modules = {module for function in self._functions for module in function.modules}
        own = {"recording": self.name, "call format": str(FORMAT)}
        return {**own, **module_digests(tops(modules)), **self._target_parts}

    def write(self) -> None:
        """Writes the manifest and the lock of what was recorded up to now.

        Raises:
          StoreError: they cannot be written.
        """
        parts = self._parts()
        manifest = Manifest(
            format=MANIFEST_FORMAT,
            config=title(self.name),
            parts=parts,
            entries=tuple(self._entries.values()),
        )
        with self.store.writing():
            self.store.write_manifest(key_of(parts), manifest)
        self.lock.parent.mkdir(parents=True, exist_ok=True)
        text = dump_lock(self._traces(), plan=title(self.name))
        new = self.lock.with_suffix(f".{os.getpid()}")
        new.write_text(text, encoding="utf-8")
        new.replace(self.lock)

    def compare(self) -> Comparison:
        """What was recorded against the lock.

        Raises:
          CheckFailed: there is no lock; ConfigError: it cannot be read.
        """
        return compare(read_lock(self.lock), self._traces(), plan=title(self.name))

    def _traces(self) -> dict[str, dict[str, LockLine]]:
        count = self._target_parts["device count"]
        return {f"{self.target} x{count}": self._lines}


def _compile(name: str, text: str, found: Lowering) -> tuple[bytes, Signature]:
    try:
        with _jax_compat.without_cache():
            compiled = found.lowered.compile()
    except Exception as error:
        raise ProgramError(
            f"the compiler refused it: {type(error).__name__}: {str(error).strip()[:1000]}",
            where=name,
            next_step="mend the program",
        ) from error
    raw = _jax_compat.serialize(compiled)
    placement = placement_of(compiled)
    return raw, replace(found.signature, placement=placement, call=text)


@contextmanager
def recording(
    name: str,
    store: str | os.PathLike[str] | None = None,
    *,
    lock: str | os.PathLike[str] | None = None,
    check: bool = False,
) -> Generator[Recording]:
    """Records the calls of `aot_lora.jit` functions inside the block, in any thread.

    Each new kind of call is traced, compiled, stored, loaded back from the store and run; so an
    engine's own warm-up by dummy runs fills the store. Nothing is readable by `replay` before the
    block has ended without an error.

    Args:
      name: letters, digits, _ . -
      store: a folder; by default that of ``AOT_LORA_CACHE``, else the platform's default.
      lock: the lock's file; by default ``recordings/NAME.lock.json`` in the store.
      check: compare with the lock instead of writing it.

    Raises:
      ConfigError: a session is open already; CheckFailed: with `check`, the lock does not hold.
    """
    session = Recording(name, store, lock=lock)
    session.open()
    try:
        yield session
    except BaseException:
        session.close(write=False)
        raise
    if check:
        session.close(write=False)
        _require_lock(session)
    else:
        session.close()


def _require_lock(session: Recording) -> None:
    found = session.compare()
    if found.holds:
        return
    lines = [f"{moved.name}: {moved.cause}" for moved in found.moved]
    lines += [f"{one}: not in the lock" for one in (*found.missing, *found.new)]
    lines += [f"{one}: in the lock only" for one in found.stale]
    raise CheckFailed(
        "what was recorded is not what the lock says",
        where=str(session.lock),
        found="\n    ".join(["", *lines]).lstrip("\n"),
        next_step="if the change was meant, record without check and check the new lock in",
    )
