"""Exports a runtime's metrics through prometheus-client (the extra ``prometheus``)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from aot_lora.runtime.metrics import Counter, Metrics


class MetricsCollector(Collector):
    """Reads the metrics when they are scraped, so serving pays nothing for the export.

    Args:
      metrics: of the runtime.

    Use ``prometheus_client.REGISTRY.register(MetricsCollector(runtime.metrics))``.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """Every metric as ``aot_lora_<name>``."""
        for name, metric in vars(self._metrics).items():
            if isinstance(metric, Counter):
                yield CounterMetricFamily(f"aot_lora_{name}", metric.help, value=metric.value)
                continue
            bounds = [*map(str, metric.bounds), "+Inf"]
            buckets = list(zip(bounds, accumulate(metric.counts), strict=True))
            yield HistogramMetricFamily(f"aot_lora_{name}", metric.help, buckets, metric.sum)
