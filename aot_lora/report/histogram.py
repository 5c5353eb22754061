"""The picture of the token buckets under a trace: where its steps are, and what pads them. Pure.

Two panels share one logarithmic axis. Above, a histogram: the height of a bar is the share of steps
in its bin, a single length where there is room. Below, a column for each bucket, from the bucket
before it: its height is the rows that are computed in it, the striped part of them padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

import numpy as np

from aot_lora.report.facts import TrafficFacts

_MARGIN = 10
_TOP, _PANEL, _BETWEEN, _AXIS = 44, 120, 46, 42
_BIN = 10
_CHAR, _LABEL = 7.0, 44.0  # width of a digit, and of "100.0 %"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A rectangle."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A text at `x`; `anchor` as SVG has it."""

    x: float
    y: float
    text: str
    anchor: str = "middle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """What is drawn, in pixels.

    Args:
      width, height: of it all; first, second: where the panels stand.
      steps: bars of the histogram; tallest: the share of the highest.
      real, padding: the columns' two parts.
      edges: where the buckets end.
      shares, wastes, ticks: labels of the upper panel, the lower one and the axis.
    """

    width: int
    height: float
    first: float
    second: float
    steps: tuple[Bar, ...]
    tallest: float
    real: tuple[Bar, ...]
    padding: tuple[Bar, ...]
    edges: tuple[float, ...]
    shares: tuple[Label, ...]
    wastes: tuple[Label, ...]
    ticks: tuple[Label, ...]


def picture(traffic: TrafficFacts, *, width: int) -> Picture:
    """Draws a trace; labels that have no room are left to the table beside it."""
    buckets = [use.bucket for use in traffic.uses]
    unit = (width - 2 * _MARGIN) / log2(buckets[-1] + 1)
    ends = [_MARGIN + unit * log2(bucket + 1) for bucket in buckets]
    starts = [float(_MARGIN), *ends[:-1]]
    first, second = _TOP + _PANEL, _TOP + _PANEL + _BETWEEN + _PANEL
    spans = list(zip(starts, ends, strict=True))
    rows = [use.bucket * use.steps for use in traffic.uses]
    highest = max(rows) or 1
    real: list[Bar] = []
    padding: list[Bar] = []
    shares: list[Label] = []
    wastes: list[Label] = []
    for (start, end), use, computed in zip(spans, traffic.uses, rows, strict=True):
        gap = min(2.0, (end - start) / 4)
        x, wide = start + gap / 2, end - start - gap
        full = _PANEL * computed / highest
        filled = full / (1 + use.waste)
        real.append(_bar(x, second - filled, wide, filled))
        padding.append(_bar(x, second - full, wide, full - filled))
        if wide >= _LABEL:
            middle = (start + end) / 2
            shares.append(Label(x=round(middle, 1), y=_TOP - 8, text=percent(use.share)))
            text = percent(use.waste) if use.steps else "never"
            wastes.append(Label(x=round(middle, 1), y=round(second - full - 6, 1), text=text))
    steps, tallest = _histogram(traffic, spans, buckets, unit, first)
    return Picture(
        width=width,
        height=second + _AXIS,
        first=first,
        second=second,
        steps=steps,
        tallest=tallest,
        real=tuple(real),
        padding=tuple(padding),
        edges=tuple(round(end, 1) for end in ends),
        shares=tuple(shares),
        wastes=tuple(wastes),
        ticks=_ticks(buckets, ends, second + 18),
    )


def percent(share: float) -> str:
    """``12.3 %``; what is more than nothing and rounds to it is said as that."""
    text = f"{100 * share:.1f} %" if share < 10 else f"{100 * share:,.0f} %"
    return "<0.1 %" if share > 0 and text == "0.0 %" else text


def _histogram(
    traffic: TrafficFacts,
    spans: Sequence[tuple[float, float]],
    buckets: Sequence[int],
    unit: float,
    bottom: float,
) -> tuple[tuple[Bar, ...], float]:
    """Bins of about `_BIN` pixels and at least one length, none across the end of a bucket."""
    edges = [1]
    for (start, end), bucket in zip(spans, buckets, strict=True):
        low = edges[-1]
        count = max(1, round((end - start) / _BIN))
        inner = np.geomspace(low, bucket + 1, count + 1).round().astype(int)
        edges += [edge for edge in dict.fromkeys(inner.tolist()) if edge > low]
    counts = np.histogram(traffic.tokens, edges, weights=traffic.counts)[0]
    most = counts.max() or 1
    sides = _MARGIN + unit * np.log2(edges)
    bars = tuple(
        _bar(x, bottom - height, wide, height)
        for x, wide, height in zip(sides, np.diff(sides), _PANEL * counts / most, strict=False)
        if height > 0
    )
    return bars, float(counts.max() / (counts.sum() or 1))


def _ticks(buckets: Sequence[int], ends: Sequence[float], y: float) -> tuple[Label, ...]:
    """The last bucket, and to its left each one that has room."""
    found: list[Label] = []
    free = float("inf")
    for bucket, end in zip(reversed(buckets), reversed(ends), strict=True):
        text = f"{bucket:,}"
        anchor = "middle" if found else "end"
        right = end + (len(text) * _CHAR / 2 if found else 0)
        if right < free:
            found.append(Label(x=round(end, 1), y=y, text=text, anchor=anchor))
            free = right - len(text) * _CHAR - 14
    return tuple(reversed(found))


def _bar(x: float, y: float, width: float, height: float) -> Bar:
    """To a hundredth: a step in ten thousand still has a line."""
    height = float(height)
    shown = max(height, 0.75) if height > 0 else 0.0
    return Bar(
        x=round(float(x), 2),
        y=round(float(y) - (shown - height), 2),
        width=round(float(width), 2),
        height=round(shown, 2),
    )
