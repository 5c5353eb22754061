"""The forms of lora_project: every way to add adapters to projections, by name.

A form is chosen for each point of a plan; see `choice`. One entry in `FORMS` registers one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from aot_lora.kernels.lora_project import baselines, mosaic_gpu, pallas_gpu, pallas_tpu, xla
from aot_lora.kernels.lora_project.xla import Arrays
from aot_lora.kernels.lora_shrink.pallas_gpu import prepare as prepare_lanes
from aot_lora.kernels.sizes import Sizes


def _anything(sizes: Sizes, platform: str) -> str:
    del sizes, platform
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to compute x @ W and each row's adapter on top.

    Args:
      name: what tables and plans call it.
      prepare: (batch, quantum=, most=) -> what `project` needs of the batch; once a batch.
      project: (x, weights, banks, layer, prepared, **tuning) -> outputs; see `xla.laned`.
      supports: (sizes, platform) -> why it cannot serve them; empty where it can.
      tunings: keyword arguments of a kernel's `project` that are worth trying; XLA tunes the rest.
      padded: whether it treats every adapter as if it were the largest that there may be.
      carries: whether `project` returns (outputs, what the next call takes for `prepared`).
    """

    name: str
    prepare: Callable[..., Any]
    project: Callable[..., Any]
    supports: Callable[[Sizes, str], str] = _anything
    tunings: tuple[Mapping[str, int], ...] = ()
    padded: bool = False
    carries: bool = False

    def divided(self, found: Any, prepared: Any) -> tuple[Arrays, Any]:
        """What `project` returned, as outputs and as `prepared` of the next call."""
        return found if self.carries else (found, prepared)


FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        Form(name="laned", prepare=xla.prepare, project=xla.laned),
        Form(
            name="one_hot",
            prepare=baselines.prepare_rows,
            project=baselines.one_hot,
            padded=True,
        ),
        Form(
            name="gather",
            prepare=baselines.prepare_rows,
            project=baselines.gather,
            supports=baselines.gather_supports,
            padded=True,
        ),
        Form(
            name="ragged",
            prepare=baselines.prepare_sorted,
            project=baselines.ragged,
            padded=True,
        ),
        Form(
            name="tpu_laned",
            prepare=pallas_tpu.prepare,
            project=pallas_tpu.laned,
            supports=pallas_tpu.supports_laned,
        ),
        Form(
            name="tpu_segments",
            prepare=pallas_tpu.prepare_segments,
            project=pallas_tpu.segmented,
            supports=pallas_tpu.supports_segments,
        ),
        Form(
            name="tpu_fused",
            prepare=pallas_tpu.prepare,
            project=pallas_tpu.fused,
            supports=pallas_tpu.supports_fused,
        ),
        Form(
            name="one_launch",
            prepare=pallas_gpu.prepare,
            project=pallas_gpu.one_launch,
            supports=pallas_gpu.supports,
            tunings=pallas_gpu.TUNINGS,
            carries=True,
        ),
        Form(
            name="extended",
            prepare=prepare_lanes,
            project=mosaic_gpu.extended,
            supports=mosaic_gpu.supports,
            tunings=mosaic_gpu.TUNINGS,
        ),
    )
}
PLAIN = FORMS["laned"]
"""The form for points that no measurement names."""
