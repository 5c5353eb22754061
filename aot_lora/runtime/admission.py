"""Admission: what fits into one batch, asked request by request."""

from __future__ import annotations

from collections.abc import Mapping

from aot_lora.errors import CapacityError, OutOfPlanError
from aot_lora.plan import Plan
from aot_lora.runtime.metrics import Metrics


class Admission:
    """A batch being put together. What does not fit is refused alone; the rest goes on.

    Args:
      plan: its token budget and largest lane bucket.
      owned: the bank blocks of each resident slot.
      adapters: most adapters in the batch; the plan's largest slot bucket unless given.
      metrics: counts refusals.
    """

    def __init__(
        self,
        plan: Plan,
        owned: Mapping[int, tuple[int, ...]],
        *,
        adapters: int | None,
        metrics: Metrics,
    ) -> None:
        self._owned = owned
        self._quantum = plan.quantum
        self._most = {
            "tokens": plan.tokens.buckets[-1],
            "adapters": plan.slots[-1] if adapters is None else adapters,
            "lanes": plan.lanes.buckets[-1] if plan.with_lora else 0,
        }
        self._metrics = metrics
        self.slots: list[int] = []
        self._adapters: set[int] = set()
        self._lanes = 0

    def add(self, slot: int, tokens: int = 1) -> None:
        """Takes a request into the batch: `tokens` rows of `slot`, -1 for no adapter.

        Raises:
          CapacityError: it does not fit beside what is in the batch; nothing has changed.
          OutOfPlanError: the slot holds no adapter, or the request alone is too large.
        """
        if tokens < 1:
            raise OutOfPlanError("a request without tokens", expected="1 or more")
        blocks = self._owned.get(slot)  # one look: a writer may be at work
        if slot != -1 and blocks is None:
            raise OutOfPlanError(
                f"slot {slot} holds no adapter",
                expected=f"-1, or one of {sorted(self._owned)}",
                next_step="load the adapter before a request names its slot",
            )
        new = slot != -1 and slot not in self._adapters
        lanes = len(blocks or ()) * self._quantum if new else 0
        wanted = {
            "tokens": (len(self.slots), tokens),
            "adapters": (len(self._adapters), int(new)),
            "lanes": (self._lanes, lanes),
        }
        for what, (held, more) in wanted.items():
            most = self._most[what]
            if held + more > most:
                self._metrics.not_admitted.add()
                kind = OutOfPlanError if more > most else CapacityError
                raise kind(
                    f"the batch has no room for {more} {what} more",
                    expected=f"at most {most} {what} in a batch",
                    found=f"{held} of them are taken",
                    next_step="raise the axis and warm up"
                    if more > most
                    else "keep the request for the next batch",
                )
        self.slots += [slot] * tokens
        self._adapters |= {slot} if new else set()
        self._lanes += lanes
