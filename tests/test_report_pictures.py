"""The pictures of a report: nothing is lost in a grid, and nothing is drawn outside its frame."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.plan import Module, Plan, UserEntry, build_plan
from aot_lora.plan.fit import histogram
from aot_lora.plan.lints import token_uses
from aot_lora.plan.memory import Memory
from aot_lora.report import Held, MemoryFacts, TrafficFacts
from aot_lora.report.budget import budget
from aot_lora.report.grid import MOST_COLUMNS, MOST_LINES, MOST_ROWS, chunks, grid
from aot_lora.report.histogram import percent, picture

BUCKETS = st.sets(st.integers(1, 5000), min_size=1, max_size=60).map(sorted).map(tuple)


def plan_of(tokens: tuple[int, ...], slots: tuple[int, ...] = (0, 1, 3)) -> Plan:
    return build_plan(
        token_buckets=tokens,
        slots=slots,
        ranks=(4, 16),
        modules=(Module(name="q", d=16, o=16, layers=1),),
        layers=1,
        dtype="float32",
        quantum=4,
        max_adapters=4,
        resident_lanes=64,
        with_lora=True,
        user=(UserEntry(name="step", entry="engine:step"),),
    )


@given(st.lists(st.integers()), st.integers(1, 30))
def test_chunks_hold_all_in_order(values: list[int], most: int) -> None:
    found = chunks(values, most)

    assert [value for chunk in found for value in chunk] == values
    assert len(found) <= most
    assert len({len(chunk) for chunk in found[:-1]}) <= 1


@given(BUCKETS, st.sets(st.integers(0, 40), min_size=1, max_size=25), st.data())
def test_a_grid_counts_every_variant_once(
    tokens: tuple[int, ...], slots: set[int], data: st.DataObject
) -> None:
    plan = plan_of(tokens, tuple(sorted(slots)))
    every = data.draw(st.integers(1, 4))
    held = {v.name: Held(key=f"{n // 2}", bytes=3, seconds=0.5 if n % 2 else None)
            for n, v in enumerate(plan.variants[::every])}  # fmt: skip
    target: Any = SimpleNamespace(held=held, form_names={})
    found = grid(plan, target)

    cells = [cell for row in found.rows for cell in row.cells if cell]
    assert sum(cell.variants for cell in cells) == len(plan.variants) == found.total.variants
    assert sum(cell.compiled or 0 for cell in cells) == len(held) == found.total.compiled
    listed = len(plan.variants) if len(plan.variants) <= MOST_LINES else 0
    assert sum(len(row.lines) for row in found.rows) == listed
    assert len(found.rows) <= MOST_ROWS + 1
    assert len(found.columns) <= MOST_COLUMNS + 1
    assert found.total.bytes == 3 * found.artifacts


@given(BUCKETS, st.sampled_from([360, 1040]), st.data())
def test_bars_and_labels_stay_in_the_frame(
    buckets: tuple[int, ...], width: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(1, buckets[-1]), min_size=1, max_size=30))
    tokens, counts = histogram(lengths)
    traffic = TrafficFacts(
        name="trace", requests=1, of="steps", budget=buckets[-1], sequences=1,
        tokens=tokens, counts=counts, uses=token_uses(plan_of(buckets), tokens, counts),
    )  # fmt: skip
    found = picture(traffic, width=width)

    for bar in (*found.steps, *found.real, *found.padding):
        assert min(bar.x, bar.y, bar.width, bar.height) >= 0
        assert bar.x + bar.width <= width
        assert bar.y + bar.height <= found.second + 0.02
    assert found.ticks[-1].text == f"{buckets[-1]:,}"
    ticks = [(label.x - len(label.text) * 3.5, label.x) for label in found.ticks]
    assert ticks == sorted(ticks)
    padded = sum(use.bucket * use.steps for use in traffic.uses)
    assert traffic.waste == pytest.approx(padded / np.sum(lengths) - 1)


def test_the_bar_of_a_device_is_as_long_as_what_is_larger() -> None:
    sizes = {"weights": 50, "banks": 30, "cache": 0, "others": 0, "outputs": 0, "temporaries": 40,
             "code": 0}  # fmt: skip
    memory = Memory(**sizes, measured=("step/t1",))
    over = budget(MemoryFacts(memory=memory, device=100, allowed=90))
    under = budget(MemoryFacts(memory=memory, device=240, allowed=240))

    assert [(part.key, part.start) for part in over.parts] == [
        ("weights", 0),
        ("banks", 41.667),
        ("temporaries", 66.667),
    ]
    assert (over.device_at, over.allowed_at, over.free, over.fits) == (83.333, 75.0, -30, False)
    assert (under.device_at, under.free, under.fits) == (100.0, 120, True)
    unknown = budget(MemoryFacts(memory=memory, device=0, allowed=0))
    assert (unknown.device_at, unknown.fits) == (None, True)


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.0, "0.0 %"), (0.0001, "<0.1 %"), (0.1234, "12.3 %"), (9.99, "999.0 %"), (20.4, "2,040 %")],
)
def test_shares_for_people(share: float, said: str) -> None:
    assert percent(share) == said
