"""What `aot-lora plan` says of buckets that bring little, and of those that traffic uses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from aot_lora.cli.options import note, table
from aot_lora.config.traffic import read_traffic
from aot_lora.errors import ConfigError
from aot_lora.plan import Plan
from aot_lora.plan.compare import Of
from aot_lora.plan.fit import histogram
from aot_lora.plan.lints import Lint, TokenUse, lane_lints, slot_lints, token_lints, token_uses
from aot_lora.plan.mix import Mix, mix_of_steps
from aot_lora.plan.simulate import Server, Steps, Traffic, simulate


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What a trace makes of a plan.

    Args:
      path: the trace; requests: in it.
      of: what lands in the buckets: simulated ``steps``, or whole ``prompts``.
      server: that was simulated; steps: that it made, or one of each prompt.
      uses: of each token bucket; lints: what follows.
    """

    path: Path
    requests: int
    of: Of
    server: Server
    steps: Steps
    uses: tuple[TokenUse, ...]
    lints: tuple[Lint, ...]

    def mix(self, plan: Plan) -> Mix:
        """Its steps, for a plan's slots and ranks."""
        return mix_of_steps(self.steps, plan)


def used_by(
    plan: Plan,
    path: Path,
    *,
    sequences: int | None,
    worth: float,
    prefill_chunk: int | None = None,
    of: Of = "steps",
) -> Used:
    """Simulates a server of the plan under a trace.

    Args:
      plan: as the config writes it.
      path: of the trace.
      sequences: that run at once; None for those of the plan's cache, else 256, as far as each
        has a token.
      worth: what a bucket has to bring, in points of waste.
      prefill_chunk: most prompt tokens of a step; None for as many as there is room for.
      of: ``prompts`` for those of the trace, clipped, instead of simulated steps.

    Raises:
      ConfigError: a bad trace, or a number that makes no sense.
    """
    if not 0 <= worth <= 100:
        raise ConfigError(
            "--worth is no share", expected="points of waste, from 0 to 100", found=f"{worth:g}"
        )
    budget = plan.tokens.buckets[-1]
    most = plan.cache.sequences if plan.cache else Server(budget=1).sequences
    server = Server(
        budget=budget,
        sequences=min(most, budget) if sequences is None else sequences,
        prefill_chunk=prefill_chunk,
    )
    traffic = read_traffic(path, timed=of == "steps")
    if of == "steps":
        steps = simulate(traffic, server)
    else:
        clipped = np.minimum(traffic.prompts, budget)
        steps = Steps(tokens=clipped, repeats=np.ones_like(clipped), slots=None, late_seconds=0.0)
    uses = token_uses(plan, *histogram(steps.tokens, steps.repeats))
    lints = (*token_lints(uses, least=worth / 100), *slot_lints(plan, steps.slots))
    note_late(steps, traffic)
    return Used(
        path=path,
        requests=len(traffic),
        of=of,
        server=server,
        steps=steps,
        uses=uses,
        lints=lints,
    )


def note_late(steps: Steps, traffic: Traffic) -> None:
    """Says on stderr that a trace is more than the simulated server does."""
    if steps.late_seconds > max(60.0, float(traffic.seconds[-1]) / 10):
        note(
            "warning: the trace is more than this server does: it ended "
            f"{steps.late_seconds:,.0f} s after the last request; its steps are fuller than those "
            "of enough servers"
        )


def lints_of(plan: Plan, used: Used | None) -> tuple[Lint, ...]:
    """Those of the trace, if there is one, and those of any traffic."""
    return (*(used.lints if used else ()), *lane_lints(plan))


def show_used(used: Used) -> None:
    """Prints a row for each token bucket."""
    print(
        f"{used.path}: {used.requests:,} requests, {used.steps.count:,} steps of at most "
        f"{used.server.budget:,} tokens and {used.server.sequences:,} sequences"
    )
    rows = [
        (
            str(use.bucket),
            f"{use.steps:,}",
            _percent(use.share),
            _percent(use.waste),
            _percent(use.padding),
            "-" if use.gain is None else f"{100 * use.gain:.2f}",
            str(use.executables),
        )
        for use in used.uses
    ]
    table(
        "token buckets under the trace (waste: padded over real, less one)",
        ("tokens", "steps", "share", "waste", "of all padding", "points of waste it saves",
         "executables"),
        rows,
    )  # fmt: skip


def uses_json(used: Used) -> dict[str, Any]:
    """The use of each token bucket."""
    return {
        "requests": used.requests,
        "steps": used.steps.count,
        "sequences": used.server.sequences,
        "tokens": [
            {
                "bucket_tokens": use.bucket,
                "steps": use.steps,
                "waste": round(use.waste, 4),
                "padding": round(use.padding, 4),
                "gain": None if use.gain is None else round(use.gain, 6),
                "executables": use.executables,
            }
            for use in used.uses
        ],
    }


def lint_json(lint: Lint) -> dict[str, Any]:
    """One lint."""
    return {
        "kind": lint.kind,
        "axis": lint.axis,
        "bucket": lint.bucket,
        "tokens": lint.tokens,
        "executables": lint.executables,
        "text": lint.text,
    }


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
