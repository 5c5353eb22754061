"""`aot-lora fit`: buckets from traffic, and rank bins from adapters."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any, cast, get_args

import click
from click.core import ParameterSource

from aot_lora.cli.grids import Task, fit_under_limits
from aot_lora.cli.lints import note_late
from aot_lora.cli.options import FORMATS, byte_count, emit, note, read_config, table
from aot_lora.cli.ranks import fit_ranks
from aot_lora.cli.writing import refuse_preset, write
from aot_lora.config import Config
from aot_lora.config.traffic import read_traffic
from aot_lora.errors import ConfigError
from aot_lora.plan.budget import Limits
from aot_lora.plan.chips import roofline, work
from aot_lora.plan.compare import Lengths, Of, Policy, compare, lengths_of
from aot_lora.plan.fit import padded_tokens
from aot_lora.plan.mix import LaneCost
from aot_lora.plan.simulate import Server, Steps

_BUDGET = 2048  # without a config, as the `budget` of the presets
_COUNT, _MULTIPLE = 10, 16  # of token buckets
_RANK_COUNT, _RANK_MULTIPLE = 4, 8  # of rank bins, as the presets' smallest rank
_WITH_RANKS = {"ranks", "count", "multiple", "config", "keep", "form", "debug"}
_COSTS = ("tokens", "work", "roofline")


@click.command()
@click.argument("traffic", type=click.Path(path_type=Path), required=False)
@click.option("--ranks", type=click.Path(path_type=Path), metavar="PATH",
              help="Fit rank bins to a folder of adapters, or to a CSV rank,count.")  # fmt: skip
@click.option("--count", type=int,
              help=f"Buckets at most. [default: {_COUNT}; of ranks {_RANK_COUNT}]")  # fmt: skip
@click.option("--multiple", type=int,
              help=f"Of what they are multiples. [default: {_MULTIPLE}; of ranks {_RANK_MULTIPLE}]",
)  # fmt: skip
@click.option("--small", is_flag=True, help="Allow powers of two below that multiple as well.")
@click.option("--of", type=click.Choice(get_args(Of)), default="steps", show_default=True,
              help="Fit the tokens of simulated steps, or of whole prompts, clipped.")  # fmt: skip
@click.option("--budget", type=int, help="Tokens of a step at most. [default: CONFIG's, or 2048]")
@click.option("--sequences", default=256, show_default=True, help="Requests that run at once.")
@click.option("--step-ms", default=1e3 * Server(budget=1).step_seconds, show_default=True,
              help="Time of a step, whatever it holds.")  # fmt: skip
@click.option("--token-us", default=1e6 * Server(budget=1).token_seconds, show_default=True,
              help="Time of each token of a step.")  # fmt: skip
@click.option("--slots", type=int, metavar="COUNT", help="Fit so many slots buckets as well.")
@click.option("--limit-variants", type=click.IntRange(1), metavar="COUNT",
              help="Fit tokens, slots and ranks together, to so many executables.")  # fmt: skip
@click.option("--limit-seconds", type=float, metavar="SECONDS",
              help="The same, to so long a warmup on this host, as estimated.")  # fmt: skip
@click.option("--limit-bytes", type=byte_count, metavar="SIZE",
              help="The same, to so much in the store, such as 64MiB.")  # fmt: skip
@click.option("--cost", type=click.Choice(_COSTS),
              help="Make padded tokens small, or CONFIG's multiply-adds, adapters included, or its "
              "seconds. [default: tokens; under a limit work]")  # fmt: skip
@click.option("--config", metavar="CONFIG", help="Compare with the buckets of this config.")
@click.option("--write", "keep", is_flag=True, help="Write the buckets into CONFIG.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.pass_context
def command(
    context: click.Context,
    traffic: Path | None,
    ranks: Path | None,
    count: int | None,
    multiple: int | None,
    small: bool,
    of: str,
    budget: int | None,
    sequences: int,
    step_ms: float,
    token_us: float,
    slots: int | None,
    limit_variants: int | None,
    limit_seconds: float | None,
    limit_bytes: int | None,
    cost: str | None,
    config: str | None,
    keep: bool,
    form: str,
    debug: bool,
) -> None:
    """The token buckets that pad the requests of TRAFFIC the least.

    TRAFFIC is CSV with a header (TIMESTAMP,ContextTokens,GeneratedTokens and, if there are any,
    Adapter) or JSON lines (time, prompt_tokens, output_tokens, adapter).

    With --ranks PATH instead: the rank bins and the lane quantum of the fewest lanes.

    With a --limit-...: the token, slots and (with --ranks PATH) rank buckets that together cost the
    steps of TRAFFIC the least within it; what the `limits:` of CONFIG allow holds as well.
    """
    del debug
    limits = Limits(variants=limit_variants, seconds=limit_seconds, store_bytes=limit_bytes)
    if limit_seconds is not None and not 0 < limit_seconds < 1e9:
        raise ConfigError(
            "a warmup of no time, or without an end",
            expected="--limit-seconds above 0",
            found=f"{limit_seconds:g}",
        )
    limited = any(limit is not None for limit in astuple(limits))
    if ranks is not None and not limited:
        _only_ranks(context)
        fit_ranks(
            ranks,
            count=_RANK_COUNT if count is None else count,
            multiple=_RANK_MULTIPLE if multiple is None else multiple,
            config=_config_for(config, keep=keep),
            form=form,
            keep=keep,
        )
        return
    if traffic is None:
        raise ConfigError(
            "nothing to fit to",
            expected="TRAFFIC, a recorded trace, or --ranks, a folder of adapters or a histogram",
        )
    multiple = _MULTIPLE if multiple is None else multiple
    cost = cost or ("work" if limited else "tokens")
    option = "--cost " + cost if cost != "tokens" else None
    current = _config_for(config, keep=keep, needed="a --limit" if limited else option)
    loaded = read_traffic(traffic, timed=of == "steps")
    held = current.written_plan.tokens.buckets if current else None
    most = (held[-1] if held else _BUDGET) if budget is None else budget
    server = Server(
        budget=most,
        sequences=sequences,
        step_seconds=step_ms / 1e3,
        token_seconds=token_us / 1e6,
        prefill_chunk=current.prefill_chunk if current else None,
    )
    if not (0 < step_ms < 1e9 and 0 <= token_us < 1e9):
        raise ConfigError(
            "a step that takes no time, or no end of it",
            expected="--step-ms above 0, --token-us from 0",
            found=f"{step_ms:g}, {token_us:g}",
        )
    lengths, steps = lengths_of(loaded, of=cast("Of", of), server=server)
    if held and held[-1] < lengths.values.max():
        note(
            f"warning: the buckets of {config} end at {held[-1]}, below the budget {most}: "
            "they are not compared"
        )
        held = None
    clipped = int((loaded.prompts > most).sum()) if of == "prompts" else 0
    head = {
        "requests": len(loaded),
        "steps": steps.count if steps else None,
        "clipped": clipped,
        "budget": most,
    }
    say = _summary(traffic, len(loaded), server, steps, clipped)
    of_lanes = _cost(cost, current)
    if limited:
        if current is None or steps is None:
            raise ConfigError(
                "a --limit for whole prompts", expected="`--of steps`: it is for steps of a server"
            )
        task = Task(
            config=current,
            steps=steps,
            limits=limits,
            budget=most,
            count=count,
            multiple=multiple,
            small=small,
            slots=slots,
            ranks=ranks,
            cost=of_lanes,
        )
        fit_under_limits(task, head=head, say=say, form=form, keep=keep)
        note_late(steps, loaded)
        return
    policies = compare(
        lengths,
        count=_COUNT if count is None else count,
        multiple=multiple,
        budget=most,
        small=small,
        cost=of_lanes(0),
        current=held,
    )
    slot_policies = _slots(steps, slots, traffic) if slots is not None else ()
    chosen = policies[-1].buckets
    if form == "json":
        emit(
            {
                **head,
                "buckets": list(chosen),
                "slots": _slot_buckets(slot_policies, steps),
                "policies": [_as_json(policy) for policy in policies],
            }
        )
    else:
        print(say)
        _show(policies, "tokens", timed=cost != "tokens")
        if slot_policies:
            _show(slot_policies, "slots")
            print(f"slots: {_slot_buckets(slot_policies, steps)}")
        print(f"tokens: {{budget: {most}, buckets: {list(chosen)}}}")
    if steps:
        note_late(steps, loaded)
    if keep and current:
        found = _slot_buckets(slot_policies, steps)
        # A batch without adapters stays planned, whether or not the trace has one.
        base = {0} & set(current.written_plan.slots)
        write(current.path, tokens=chosen, slots=tuple(sorted({*base, *found})) if found else None)


def _only_ranks(context: click.Context) -> None:
    """Refuses what would change nothing."""
    default = (ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP)
    given = [
        "TRAFFIC" if name == "traffic" else f"--{name.replace('_', '-')}"
        for name in context.params
        if name not in _WITH_RANKS and context.get_parameter_source(name) not in default
    ]
    if given:
        raise ConfigError(
            f"{', '.join(given)} beside --ranks",
            expected="only --count, --multiple, --config, --write and --format",
            next_step="fit the ranks and the traffic one after the other, or name a --limit-...",
        )


def _config_for(name: str | None, *, keep: bool, needed: str | None = None) -> Config | None:
    if keep:
        refuse_preset(name)
    if name is not None:
        return read_config(name, None, limited=False)  # one above its limits is here to be mended
    if needed is not None:
        raise ConfigError(f"{needed} needs a config", next_step="name it with --config")
    return None


def _cost(name: str, config: Config | None) -> LaneCost:
    if config is None or name == "tokens":
        return lambda _: padded_tokens
    plan, target = config.plan, config.targets[0]
    if name == "work":
        return work(plan)
    return lambda lanes: roofline(plan, target, lanes=lanes)


def _slots(steps: Steps | None, count: int, traffic: Path) -> tuple[Policy, ...]:
    if steps is None or steps.slots is None:
        raise ConfigError(
            "no adapters to fit slots to",
            where=str(traffic),
            expected="a trace with an adapter of each request, and `--of steps`",
            next_step="leave out --slots, or record the adapters",
        )
    some = steps.slots > 0  # a step without adapters runs no LoRA program and pads nothing
    lengths = Lengths(values=steps.slots[some], repeats=steps.repeats[some])
    return compare(lengths, count=count, multiple=1, budget=int(steps.slots.max()))


def _slot_buckets(policies: tuple[Policy, ...], steps: Steps | None) -> list[int] | None:
    if not policies or steps is None or steps.slots is None:
        return None
    return [*([0] if (steps.slots == 0).any() else []), *policies[-1].buckets]


def _summary(
    traffic: Path, requests: int, server: Server, steps: Steps | None, clipped: int
) -> str:
    head = f"{traffic}: {requests:,} requests"
    if steps is None:
        return f"{head}, {clipped:,} of them with prompts clipped to {server.budget:,} tokens"
    return (
        f"{head}, {steps.count:,} steps of at most {server.budget:,} tokens and "
        f"{server.sequences:,} sequences"
        + ("" if steps.slots is None else f", at most {steps.slots.max()} adapters in one")
    )


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _show(policies: tuple[Policy, ...], axis: str, *, timed: bool = False) -> None:
    columns = ("policy", "buckets", "whole trace", "held-out half", "later half")
    rows = [
        (p.name, str(len(p.buckets)), *map(_percent, (p.waste, p.held_out, p.later)))
        for p in policies
    ]
    if timed:
        columns = (*columns, "seconds, whole trace")
        rows = [(*row, _percent(p.excess)) for row, p in zip(rows, policies, strict=True)]
    table(f"waste of the {axis} axis (padded over real, less one)", columns, rows)
    for policy in policies:
        total = sum(use.steps for use in policy.used)
        padded = sum(use.bucket * use.steps - use.real for use in policy.used)
        rows = [
            (
                str(use.bucket),
                _percent(use.steps / total),
                _percent(use.waste),
                _percent((use.bucket * use.steps - use.real) / padded if padded else 0.0),
            )
            for use in policy.used
        ]
        table(policy.name, (axis, "share of steps", "waste", "share of all padding"), rows)


def _as_json(policy: Policy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "waste": round(policy.waste, 4),
        "held_out": round(policy.held_out, 4),
        "later": round(policy.later, 4),
        "cost": round(policy.excess, 4),
        "buckets": [
            {"bucket_tokens": use.bucket, "steps": use.steps, "waste": round(use.waste, 4)}
            for use in policy.used
        ],
    }
