"""Prepared adapters in host memory: read once, kept while they are used, within a byte budget."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from aot_lora.adapters import Packed, pack, read_adapter
from aot_lora.plan import Plan
from aot_lora.runtime.metrics import Metrics


class HostCache:
    """Adapters by their files' identity; the least recently used go first.

    A file that has changed is read again. One that is asked for twice at once is read once.

    Args:
      plan: what adapters are packed for.
      budget_bytes: most bytes kept; an adapter above it is served and not kept.
      pinned: whether a folder's adapter is kept whatever the budget says.
      metrics: counts hits and misses.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        budget_bytes: int,
        pinned: Callable[[Path], bool],
        metrics: Metrics,
    ) -> None:
        self._plan = plan
        self._budget_bytes = budget_bytes
        self._pinned = pinned
        self._metrics = metrics
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, tuple[Hashable, Packed]] = OrderedDict()
        self._reading: dict[Path, Future[Packed]] = {}
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="aot-lora-prefetch")

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters kept."""
        with self._lock:
            return sum(packed.nbytes for _, packed in self._kept.values())

    def prefetch(self, folder: str | os.PathLike[str]) -> Future[Packed]:
        """Reads an adapter in the background. The future holds it, or the error that refused it."""
        return self._threads.submit(self.get, folder)

    def get(self, folder: str | os.PathLike[str]) -> Packed:
        """The adapter in a folder, from memory or from its files.

        Raises:
          AdapterError: it cannot be served.
        """
        path = Path(folder).absolute()
        with self._lock:
            reading = self._reading.get(path)
            mine = reading is None
            if reading is None:
                reading = self._reading[path] = Future()
        if not mine:
            return reading.result()
        try:
            packed = self._read(path)
        except BaseException as error:
            reading.set_exception(error)
            raise
        else:
            reading.set_result(packed)
            return packed
        finally:
            with self._lock:
                del self._reading[path]

    def close(self) -> None:
        """Ends the thread that prefetches."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _read(self, path: Path) -> Packed:
        adapter = read_adapter(path)
        with self._lock:
            stamp, packed = self._kept.get(path, (None, None))
            if packed is not None and stamp == adapter.stamp:
                self._kept.move_to_end(path)
                self._metrics.host_hits.add()
                return packed
        self._metrics.host_misses.add()
        packed = pack(adapter, self._plan)
        with self._lock:
            self._kept[path] = (adapter.stamp, packed)
            self._kept.move_to_end(path)
            self._shrink()
        return packed

    def _shrink(self) -> None:
        held = sum(packed.nbytes for _, packed in self._kept.values())
        for path in list(self._kept):
            if held <= self._budget_bytes:
                return
            if not self._pinned(path):
                held -= self._kept.pop(path)[1].nbytes
