"""Which form serves a point: the fastest of those that were measured nearest to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import log2
from typing import Any

from aot_lora.config.tables import Row, Table
from aot_lora.kernels.forms import FORMS, PLAIN, Form
from aot_lora.kernels.sizes import Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A form for a point.

    Args:
      form: which.
      tuning: its block sizes and the like.
      reason: why, for a person.
    """

    form: Form
    tuning: Mapping[str, int] = field(default_factory=dict[str, int])
    reason: str

    def project(self) -> partial[Any]:
        """The form's `project` with its tuning."""
        return partial(self.form.project, **self.tuning)


def choose(table: Table | None, sizes: Sizes, platform: str) -> Choice:
    """The form for projections of these sizes.

    Args:
      table: of the target's hardware; without one it is `PLAIN`.
      sizes: of the projections on one device.
      platform: ``cpu``, ``cuda`` or ``tpu``.
    """
    if table is None or not table.rows:
        return Choice(form=PLAIN, reason="no kernels were measured for this hardware")
    row = min(table.rows, key=partial(_distance, sizes, platform))
    point = f"t{row.tokens}-l{row.lanes}-d{row.d}-o{row.o}"
    why = ""
    for name, us in _fastest_first(row):
        form = FORMS[name]
        refused = form.supports(sizes, platform)
        if form.padded and sizes.most > row.most:
            refused = f"adapters of up to {sizes.most} blocks, measured with {row.most}"
        if not refused:
            measured = f"{us:.4g} us at {point}, the least of {len(row.us)}"
            return Choice(form=form, tuning=row.tuning.get(name, {}), reason=measured + why)
        why += f"; not {name}: {refused}"
    return Choice(form=PLAIN, reason=f"none that was measured at {point} serves it{why}")


def _fastest_first(row: Row) -> Iterator[tuple[str, float]]:
    known = [(name, us) for name, us in row.us.items() if name in FORMS]
    yield from sorted(known, key=lambda pair: pair[1])


def _distance(sizes: Sizes, platform: str, row: Row) -> tuple[bool, float]:
    """How far a row is: factors of two, summed over the sizes.

    One whose fastest form cannot serve these sizes is farther than any other: it is of a size where
    other forms compete.
    """
    fastest = next((FORMS[name] for name, _ in _fastest_first(row)), PLAIN)
    pairs = (
        (sizes.tokens, row.tokens),
        (sizes.lanes, row.lanes),
        (sizes.d, row.d),
        (sum(sizes.o), row.o),
    )
    total = sum(abs(log2(one) - log2(other)) for one, other in pairs)
    return bool(fastest.supports(sizes, platform)), total
