"""Adapters of a runtime: from folders into slots, in use, and out again, while it serves."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from aot_lora.adapters import Packed
from aot_lora.errors import AdapterError, CapacityError, OutOfPlanError
from aot_lora.plan import Plan, round_up
from aot_lora.runtime.banks import Banks
from aot_lora.runtime.host_cache import HostCache
from aot_lora.runtime.metrics import Metrics


@dataclass(slots=True, kw_only=True)
class Resident:
    """An adapter in the banks.

    Args:
      slot: where.
      folder: what it was read from.
      packed: what was written.
      uses: how many hold it; above 0 it stays where it is.
    """

    slot: int
    folder: Path
    packed: Packed
    uses: int = 0


class Adapters:
    """Loads, keeps and swaps adapters; any thread may call it, and writes happen one at a time.

    Args:
      plan: ranks, slots and lanes.
      banks: where adapters go.
      swap: whether idle adapters give way when the banks are full; otherwise a full bank refuses.
      host_cache_bytes: prepared adapters kept in host memory.
      metrics: counts.
    """

    def __init__(
        self, plan: Plan, banks: Banks, *, swap: bool, host_cache_bytes: int, metrics: Metrics
    ) -> None:
        self._plan = plan
        self._banks = banks
        self._swap = swap
        self._metrics = metrics
        self._writer = threading.Lock()  # one load or unload at a time
        self._lock = threading.Lock()  # the fields below, for an instant
        self._resident: OrderedDict[str, Resident] = OrderedDict()  # least recently used first
        self._folders: dict[str, Path] = {}
        self._pinned: set[str] = set()
        self.host = HostCache(
            plan, budget_bytes=host_cache_bytes, pinned=self._is_pinned, metrics=metrics
        )

    @property
    def resident(self) -> dict[str, int]:
        """Name -> slot of what is in the banks, least recently used first."""
        with self._lock:
            return {name: found.slot for name, found in self._resident.items()}

    def register(self, folder: str | os.PathLike[str], *, name: str | None = None) -> str:
        """Makes an adapter known, so that `use` can load it when it is first asked for.

        Returns:
          Its name: as given, else the folder as written.
        """
        name = os.fspath(folder) if name is None else name
        with self._lock:
            self._folders[name] = Path(folder).absolute()
        return name

    def prefetch(self, folder: str | os.PathLike[str]) -> Future[Packed]:
        """Reads an adapter into the host cache, in the background."""
        return self.host.prefetch(folder)

    def load(
        self, folder: str | os.PathLike[str], *, name: str | None = None, pin: bool = False
    ) -> int:
        """Puts the adapter of a folder into a slot, in place, without a compile.

        A name that is loaded already is replaced, in its slot, unless its files are the same.

        Args:
          folder: of ``adapter_config.json`` and ``adapter_model.safetensors``.
          name: what to call it; the folder as written unless given.
          pin: keeps it in the banks and in host memory until `unpin` or `unload`.

        Returns:
          The slot.

        Raises:
          AdapterError: it cannot be served. CapacityError: no room, or the name is in use.
            Nothing has changed then.
        """
        name = os.fspath(folder) if name is None else name
        return self._load(name, Path(folder).absolute(), pin=pin, use=False)

    def unload(self, name: str) -> None:
        """Empties an adapter's slot and forgets it.

        Raises:
          CapacityError: it is in use. OutOfPlanError: no such adapter.
        """
        self._banks.gate.check_may_write()  # before anything changes
        with self._writer:
            with self._lock:
                found = self._idle(name)
                self._resident.pop(name, None)
                self._folders.pop(name, None)
                self._pinned.discard(name)
            if found is not None:
                self._banks.reset(found.slot)
                self._metrics.unloads.add()

    def pin(self, name: str) -> None:
        """Keeps an adapter that is loaded, or will be, from giving way to others."""
        with self._lock:
            self._require_known(name)
            self._pinned.add(name)

    def unpin(self, name: str) -> None:
        """Takes `pin` back."""
        with self._lock:
            self._require_known(name)
            self._pinned.discard(name)

    def acquire(self, name: str) -> int:
        """The slot of an adapter, which it keeps until `release`. Loads it where need be.

        Args:
          name: of an adapter that `load` or `register` has seen.

        Raises:
          OutOfPlanError: no such adapter. AdapterError, CapacityError: as `load`.
        """
        with self._lock:
            self._require_known(name)
            found = self._resident.get(name)
            if found is not None:
                found.uses += 1
                self._resident.move_to_end(name)
                return found.slot
            folder = self._folders[name]
        return self._load(name, folder, pin=False, use=True)

    def release(self, name: str) -> None:
        """Ends one `acquire`."""
        with self._lock:
            found = self._resident.get(name)
            if found is None or not found.uses:
                raise OutOfPlanError(f"adapter `{name}` is not in use", expected="one release each")
            found.uses -= 1

    @contextmanager
    def use(self, name: str) -> Generator[int]:
        """`acquire` and `release` around a block."""
        slot = self.acquire(name)
        try:
            yield slot
        finally:
            self.release(name)

    def close(self) -> None:
        """Ends the thread that prefetches."""
        self.host.close()

    def _load(self, name: str, folder: Path, *, pin: bool, use: bool) -> int:
        self._banks.gate.check_may_write()  # before anything changes
        began = time.perf_counter()
        try:
            packed = self.host.get(folder)
        except AdapterError:
            self._metrics.refused_adapters.add()
            raise
        with self._writer:
            with self._lock:
                found = self._resident.get(name)
                # Nothing to write: the same files, or another thread loaded it for `acquire` first.
                if found is not None and (use or found.packed is packed):
                    return self._publish(name, found, pin=pin, use=use)
                slot, leaving = self._make_room(name, packed)
            for other in leaving:
                self._banks.reset(other.slot)
                self._metrics.evictions.add()
            self._banks.put(slot, packed)
            self._metrics.loads.add()
            self._metrics.loaded_bytes.add(packed.nbytes)
            self._metrics.load_seconds.observe(time.perf_counter() - began)
            with self._lock:
                found = Resident(slot=slot, folder=folder, packed=packed)
                return self._publish(name, found, pin=pin, use=use)

    def _publish(self, name: str, found: Resident, *, pin: bool, use: bool) -> int:
        self._resident[name] = found
        self._resident.move_to_end(name)
        self._folders[name] = found.folder
        found.uses += use
        if pin:
            self._pinned.add(name)
        return found.slot

    def _make_room(self, name: str, packed: Packed) -> tuple[int, list[Resident]]:
        """A slot, and who has to leave; they are out of the books when this returns.

        Raises:
          CapacityError: there is no room, and nobody may leave; nobody has then.
        """
        mine = self._idle(name) if name in self._resident else None
        needed = round_up(packed.rank, self._plan.quantum)
        lanes = self._banks.free_lanes + (self._banks.lanes_of(mine.slot) if mine else 0)
        slots = set(range(self._plan.max_adapters)) - self._banks.owned.keys()
        slots |= {mine.slot} if mine else set()
        leaving: list[str] = []
        for other, found in self._resident.items():
            if slots and lanes >= needed:
                break
            if self._swap and found is not mine and not found.uses and other not in self._pinned:
                leaving.append(other)
                lanes += self._banks.lanes_of(found.slot)
                slots.add(found.slot)
        if not slots or lanes < needed:
            raise self._full(name, needed, lanes, bool(slots))
        gone = [self._resident.pop(other) for other in leaving]
        if mine is not None:
            del self._resident[name]
        return (mine.slot if mine else min(slots)), gone

    def _full(self, name: str, needed: int, lanes: int, slot: bool) -> CapacityError:
        idle = "; all others are in use or pinned" if self._swap else ""
        return CapacityError(
            f"no room for adapter `{name}`{idle}",
            expected=f"{needed} free lanes and a free slot",
            found=f"{lanes} lanes, {'a' if slot else 'no'} slot; "
            f"{len(self._resident)} of {self._plan.max_adapters} adapters resident",
            next_step="release or unload one, set `adapters: {mode: swap}`, or raise "
            "lora.resident_lanes or max_adapters and warm up",
        )

    def _idle(self, name: str) -> Resident | None:
        self._require_known(name)
        found = self._resident.get(name)
        if found is not None and found.uses:
            raise CapacityError(
                f"adapter `{name}` is in use",
                where=f"slot {found.slot}",
                found=f"{found.uses} hold it",
                next_step="release it first, or load the new one under another name",
            )
        return found

    def _require_known(self, name: str) -> None:
        if name not in self._folders:
            raise OutOfPlanError(
                f"no adapter `{name}`",
                expected=f"one of {sorted(self._folders)}" if self._folders else "one loaded",
                next_step="load() or register() its folder first",
            )

    def _is_pinned(self, folder: Path) -> bool:
        return any(self._folders.get(name) == folder for name in tuple(self._pinned))
