"""What `aot-lora fit --ranks` says: rank bins and the lane quantum."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from aot_lora.adapters.naming import listed
from aot_lora.adapters.ranks import RankCounts, read_ranks
from aot_lora.cli.options import emit, note, table
from aot_lora.cli.writing import write
from aot_lora.config import Config
from aot_lora.plan.ranks import RankPolicy, by_quantum, compare_ranks


def fit_ranks(
    path: Path, *, count: int, multiple: int, config: Config | None, form: str, keep: bool
) -> None:
    """Fits bins to the adapters of a folder or histogram, compares and prints them.

    With `keep` they and their quantum are written into the config.
    """
    found = read_ranks(path)
    ranks, counts = np.asarray(found.ranks, np.int64), np.asarray(found.counts, np.int64)
    tried = by_quantum(ranks, counts, count=count, multiple=multiple)
    policies = compare_ranks(
        ranks, counts, count=count, multiple=multiple, current=_current(config, found)
    )
    chosen = policies[-1]
    if form == "json":
        emit(
            {
                "adapters": sum(found.counts),
                "ranks": list(chosen.ranks),
                "quantum": chosen.quantum,
                "policies": [_as_json(policy) for policy in policies],
                "quanta": [_as_json(policy) for policy in tried],
            }
        )
    else:
        _show(path, found, policies, tried)
    if found.others:
        note(f"no adapter in {len(found.others)} of the subfolders: {listed(found.others)}")
    if keep and config is not None:
        write(config.path, ranks=chosen.ranks, quantum=chosen.quantum)


def _current(config: Config | None, found: RankCounts) -> tuple[tuple[int, ...], int] | None:
    if config is None:
        return None
    held = config.plan.adapter_lanes.buckets
    if held[-1] < found.ranks[-1]:
        note(
            f"warning: the ranks of {config.path} end at {held[-1]}, below the largest adapter's "
            f"{found.ranks[-1]}: they are not compared"
        )
        return None
    return held, config.plan.quantum


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _row(policy: RankPolicy, name: str) -> tuple[str, ...]:
    return (
        name,
        str(policy.quantum),
        str(len(policy.ranks)),
        f"{policy.binned_lanes:,}",
        _percent(policy.waste),
        f"{policy.owned_lanes:,}",
        _percent(policy.owned_waste),
        str(policy.most_blocks),
    )


def _show(
    path: Path,
    found: RankCounts,
    policies: tuple[RankPolicy, ...],
    tried: tuple[RankPolicy, ...],
) -> None:
    each = ", ".join(f"{c:,} of {r}" for r, c in zip(found.ranks, found.counts, strict=True))
    few = len(found.ranks) <= 12
    print(
        f"{path}: {sum(found.counts):,} adapters of {len(found.ranks)} ranks, "
        + (each if few else f"{found.ranks[0]} to {found.ranks[-1]}")
    )
    columns = ("quantum", "bins", "lanes in bins", "waste", "lanes in banks", "waste",
               "blocks of the largest")  # fmt: skip
    rows = [_row(policy, policy.name) for policy in policies]
    table("lanes of all adapters (waste: over their ranks, less one)", ("policy", *columns), rows)
    rows = [_row(p, str(p.quantum))[1:] for p in tried]
    table("the fit for each quantum", columns, rows)
    chosen = policies[-1]
    rows = [(str(use.bucket), f"{use.steps:,}", _percent(use.waste)) for use in chosen.used]
    table("bins of the fit", ("rank", "adapters", "waste"), rows)
    print(f"lora: {{ranks: {list(chosen.ranks)}, quantum: {chosen.quantum}}}")


def _as_json(policy: RankPolicy) -> dict[str, Any]:
    return {
        "name": policy.name,
        "quantum": policy.quantum,
        "binned_lanes": policy.binned_lanes,
        "waste": round(policy.waste, 4),
        "owned_lanes": policy.owned_lanes,
        "owned_waste": round(policy.owned_waste, 4),
        "most_blocks": policy.most_blocks,
        "bins": [
            {"rank": use.bucket, "adapters": use.steps, "waste": round(use.waste, 4)}
            for use in policy.used
        ],
    }
