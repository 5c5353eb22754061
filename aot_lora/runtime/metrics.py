"""What a runtime counts: plain objects, read at any time; `prometheus.py` exports them."""

from __future__ import annotations

import threading
from bisect import bisect_left


class Counter:
    """A number that only grows. Safe from any thread."""

    __slots__ = ("_lock", "help", "value")

    def __init__(self, text: str) -> None:
        self.help = text
        self.value = 0
        self._lock = threading.Lock()

    def add(self, amount: int = 1) -> None:
        """Adds `amount`; `+=` alone can lose counts between threads."""
        with self._lock:
            self.value += amount


class Histogram:
    """Counts of observations up to each bound, their number and their sum."""

    __slots__ = ("_lock", "bounds", "counts", "help", "sum")

    def __init__(self, text: str, bounds: tuple[float, ...]) -> None:
        self.help = text
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)  # the last one: above every bound
        self.sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Counts one observation."""
        index = bisect_left(self.bounds, value)
        with self._lock:
            self.counts[index] += 1
            self.sum += value

    @property
    def count(self) -> int:
        """How many observations."""
        return sum(self.counts)


_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Metrics:
    """The counters and histograms of one runtime; each one's `help` says what it counts."""

    def __init__(self) -> None:
        self.lookups = Counter("executables looked up for user programs")
        self.batches = Counter("batches made")
        self.rows = Counter("rows of batches, without padding")
        self.padded_rows = Counter("rows of batches, with padding")
        self.misses = Counter("points of the plan found without an executable of their own")
        self.recorded_buckets = Counter("buckets recorded for batches larger than the plan")
        self.background_warmups = Counter("warmups in the background that brought all they should")
        self.background_failures = Counter("warmups in the background that failed")
        self.not_admitted = Counter("requests that a batch had no room for")
        self.loads = Counter("adapters written into the banks")
        self.evictions = Counter("adapters that gave way to others")
        self.unloads = Counter("adapters unloaded on request")
        self.refused_adapters = Counter("adapters that could not be served")
        self.loaded_bytes = Counter("bytes of adapters written into the banks")
        self.host_hits = Counter("adapters found in the host cache")
        self.host_misses = Counter("adapters read from their files")
        self.pad_waste = Histogram("share of a batch's rows that is padding", _SHARES)
        self.load_seconds = Histogram("from the call to the slot, in seconds", _SECONDS)

    def snapshot(self) -> dict[str, int | float | dict[str, float]]:
        """All values by name; a histogram as its count and sum."""
        found: dict[str, int | float | dict[str, float]] = {}
        for name, metric in vars(self).items():
            if isinstance(metric, Counter):
                found[name] = metric.value
            else:
                found[name] = {"count": metric.count, "sum": metric.sum}
        return found
