"""Buckets that a config asks to be fitted to a trace: ``{fit: traffic.csv, count: 10}``."""

from __future__ import annotations

from pathlib import Path

from aot_lora.config.schema import FitBuckets, TokensSection
from aot_lora.config.traffic import read_traffic
from aot_lora.errors import ConfigError, PlanError
from aot_lora.plan.compare import lengths_of
from aot_lora.plan.fit import fit
from aot_lora.plan.simulate import Server


def trace_of(section: FitBuckets, config: Path) -> Path:
    """The trace that a section names; its path starts at the folder of the config."""
    return config.parent / Path(section.fit).expanduser()


def fitted_buckets(
    section: FitBuckets, tokens: TokensSection, config: Path, where: str
) -> tuple[int, ...]:
    """The buckets, fitted to the whole trace.

    Args:
      section: what is asked for; tokens: the section that it stands in.
      config: the config's file.
      where: the place of the section.

    Raises:
      ConfigError: the trace is bad, or there are no such buckets.
    """
    trace = trace_of(section, config)
    if not trace.is_file():
        raise ConfigError(
            "the trace to fit is no file",
            where=where,
            expected="a file, from the folder of the config",
            found=str(trace),
            next_step="bring it along, or write the buckets out by `aot-lora fit --write`",
        )
    traffic = read_traffic(trace, timed=section.of == "steps")
    budget = tokens.budget
    server = Server(budget=budget, sequences=section.sequences, prefill_chunk=tokens.prefill_chunk)
    try:
        lengths, _ = lengths_of(traffic, of=section.of, server=server)
        return fit(
            *lengths.counted(),
            count=section.count,
            multiple=section.multiple,
            budget=budget,
            small=section.small,
        )
    except PlanError as error:
        raise ConfigError(error.problem, **{**error.fields(), "where": where}) from None
