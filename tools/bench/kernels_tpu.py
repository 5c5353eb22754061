"""Static costs of the TPU kernels, tuned, beside those of published systems' forms.

    python tools/bench/kernels_tpu.py                       # the points below, as JSON lines
    python tools/bench/kernels_tpu.py --table OUT.json      # tunes a preset's points for `choice`

A cost is what `tpu_static` says: it ranks kernels and is no time. Tokens come in runs of one
adapter, all equally long; a block of tokens is taken to straddle one boundary of runs.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

from lines import emit, note
from tpu_static import CHIPS, Cost, Job, costs_by_two

from aot_lora.kernels import tpu_sizes as sizes
from aot_lora.kernels.lora_expand import pallas_tpu as expand
from aot_lora.kernels.lora_fused import pallas_tpu as fuse
from aot_lora.kernels.lora_segments import pallas_tpu as segment
from aot_lora.kernels.lora_shrink import pallas_tpu as shrink
from aot_lora.plan import round_up

ITEM, LIMIT_S = 2, 60.0
MIX = (8, 16, 32, 64, 128)

# (tokens, ranks, O) at D = 4096; one token has one adapter.
POINTS = tuple(
    (tokens, tuple(islice(cycle(ranks), adapters)), o)
    for tokens in (1, 16, 128, 2048, 8192)
    for o in (4096, 14336)
    for adapters in ((1,) if tokens == 1 else (1, 8, 32))
    for ranks in ((16,), (64,), MIX)[: 2 if adapters == 1 else 3]
)
TOKENS, LANES = (16, 128, 2048), (128, 512)
SITES = ((4096, (4096, 1024, 1024)), (4096, (4096,)), (4096, (14336, 14336)), (14336, (4096,)))
ADAPTERS, QUANTUM = 8, 8  # active at once, at most, and lanes of a block, in the preset


class Key(NamedTuple):
    """What is tuned: an operation at sizes. `listed` are the lanes a block of tokens needs."""

    op: str
    tokens: int
    lanes: int
    d: int
    o: int
    quantum: int
    listed: int = 0


Best = dict[Key, tuple[Cost, dict[str, int]]]


def candidates(key: Key) -> Iterable[tuple[dict[str, int], int]]:
    """Block sizes to try, with the bytes they move."""
    op, tokens, lanes, d, o, quantum, listed = key
    rows = (tokens,) if tokens <= 512 else (256, 512)
    if op == "lora_shrink":
        for t in rows:
            for part in (1, 2):
                size = {"block_t": t, "block_d": sizes.divisor(d, d // part)}
                full = sizes.shrink_sizes(tokens, lanes, d, quantum, ITEM) | size
                if not shrink.supports(tokens, lanes, d, quantum, ITEM, **size):
                    yield size, sizes.shrink_hbm_bytes(tokens, lanes, d, ITEM, full)
    elif op == "lora_expand":
        for t in rows:
            for part in (1, 2, 4):
                size = {"block_t": t, "block_o": sizes.divisor(o, o // part)}
                full = sizes.expand_sizes(tokens, lanes, o, quantum, ITEM) | size
                if not expand.supports(tokens, lanes, o, quantum, ITEM, **size):
                    yield size, sizes.expand_hbm_bytes(tokens, lanes, o, ITEM, full)
    elif op == "lora_fused":
        wide = ((512, 4096), (1024, 4096)) if tokens <= 128 else ((2048, 1024),)
        for d_most, o_most in wide:
            size = {"block_t": min(tokens, 512)}
            size |= {"block_d": sizes.divisor(d, d_most), "block_o": sizes.divisor(o, o_most)}
            if not fuse.supports(tokens, lanes, d, o, quantum, ITEM, **size):
                yield size, sizes.fused_hbm_bytes(tokens, lanes, d, o, ITEM, size)
    else:
        full = sizes.segments_sizes(tokens, lanes, d, o, quantum, ITEM)
        tiles = math.ceil(listed / full["block_l"])
        read = tokens // full["block_t"] * tiles * full["block_l"]
        moved = sizes.segments_hbm_bytes(tokens, read, d, o, ITEM)
        for part in (1, 2):
            size = full | {"block_o": sizes.divisor(o, o // part)}
            if not segment.supports(tokens, lanes, d, o, quantum, ITEM, **size):
                yield {**size, "tiles": tiles}, moved


def tune(topology: str, keys: Iterable[Key]) -> Best:
    """The cheapest block sizes of each operation; none where the compiler takes none in time."""
    tries = [(key, *found) for key in dict.fromkeys(keys) for found in candidates(key)]
    note(f"{len(tries)} kernels to cost")
    jobs = [
        Job(
            entry="kernels_tpu_one:kernel",
            options={
                "op": key.op,
                "tokens": key.tokens,
                "lanes": key.lanes,
                "quantum": key.quantum,
                "d": key.d,
                "o": key.o,
                "tuning": size,
            },
            hbm_bytes=moved,
        )
        for key, size, moved in tries
    ]
    best: Best = {}
    for (key, size, _), cost in zip(
        tries, costs_by_two(topology, jobs, limit_s=LIMIT_S), strict=True
    ):
        # Of equal costs, as where bytes decide, fewer cycles.
        if not cost.error and (key not in best or cost < best[key][0]):
            best[key] = cost, size
        if cost.error:
            note(f"{key} {size}: {cost.error}")
    return best


def bucket(ranks: tuple[int, ...]) -> int:
    """Lanes of a bucket for these adapters: whole registers, as powers of two are, beyond one."""
    lanes = sum(ranks)
    return lanes if lanes <= 128 else round_up(lanes, 128)


def listed_lanes(tokens: int, ranks: tuple[int, ...], quantum: int) -> int:
    """Lanes that a block of tokens needs; one more adapter than fits, for the boundary."""
    lanes = sum(ranks)
    block_t = sizes.segments_sizes(tokens, bucket(ranks), 128, 128, quantum, ITEM)["block_t"]
    if block_t == tokens:
        return lanes
    some = min(len(ranks), math.ceil(len(ranks) * block_t / tokens) + 1)
    return min(lanes, math.ceil(lanes * some / len(ranks)))


def keys_of(tokens: int, ranks: tuple[int, ...], d: int, o: int, quantum: int) -> dict[str, Key]:
    """What serves a projection, by operation."""
    lanes = bucket(ranks)
    listed = listed_lanes(tokens, ranks, quantum)
    return {
        "lora_shrink": Key("lora_shrink", tokens, lanes, d, 128, quantum),
        "lora_expand": Key("lora_expand", tokens, lanes, 128, o, quantum),
        "lora_segments": Key("lora_segments", tokens, lanes, d, o, quantum, listed),
        "lora_fused": Key("lora_fused", tokens, lanes, d, o, quantum),
    }


def base_job(tokens: int, d: int, o: int) -> Job:
    """The base projection in XLA."""
    moved = ITEM * (tokens * d + d * o + tokens * o)
    options = {"tokens": tokens, "d": d, "o": o}
    return Job(entry="kernels_tpu_forms:base", options=options, hbm_bytes=moved, free_layouts=True)


def base_us(topology: str, tokens: int, d: int, o: int, cost: Cost) -> float:
    """The base's cost: its bytes where they decide.

    There the profile's cycles hold a wait for HBM that it does not count in a Pallas kernel.
    """
    chip, job = CHIPS[topology.partition(":")[0]], base_job(tokens, d, o)
    roof_us = job.hbm_bytes / chip.hbm_bytes_per_s * 1e6
    flop_us = 2 * tokens * d * o / chip.flop_per_s * 1e6
    return roof_us if roof_us > flop_us else cost.us


def peer_job(name: str, tokens: int, ranks: tuple[int, ...], d: int, o: int) -> Job:
    """A peer, dense in the adapters of the batch, each as wide as the widest."""
    options = {"tokens": tokens, "adapters": len(ranks), "rank": max(ranks), "d": d, "o": o}
    moved = ITEM * (tokens * d + len(ranks) * max(ranks) * (d + o) + 2 * tokens * o)
    return Job(
        entry=f"kernels_tpu_forms:{name}", options=options, hbm_bytes=moved, free_layouts=True
    )


def laned_job(tokens: int, lanes: int, d: int, o: int, quantum: int) -> Job:
    """Laned in plain XLA, without the base."""
    options = {"tokens": tokens, "lanes": lanes, "quantum": quantum, "d": d, "o": o}
    moved = ITEM * (tokens * d + lanes * (d + o) + 2 * tokens * o)
    return Job(entry="kernels_tpu_forms:laned", options=options, hbm_bytes=moved, free_layouts=True)


def run(topology: str = "v6e:1x1", points: Iterable[Any] = POINTS) -> None:
    """Prints each form's cost of adding adapters, without the base, beside each peer's."""
    points, d = tuple(points), 4096
    # Lanes of a block, as a server of these ranks has them.
    quanta = {ranks: math.gcd(*ranks) for _, ranks, _ in points}
    keys = {point: keys_of(*point[:2], d, point[2], quanta[point[1]]) for point in points}
    best = tune(topology, (key for of in keys.values() for key in of.values()))
    jobs: list[Job] = []
    for tokens, ranks, o in points:
        jobs += [
            base_job(tokens, d, o),
            laned_job(tokens, bucket(ranks), d, o, quanta[ranks]),
            peer_job("one_hot", tokens, ranks, d, o),
        ]
        if tokens <= 16:  # Beyond, its profile takes longer than the limit.
            jobs.append(peer_job("ragged", tokens, ranks, d, o))
    found = dict(zip(map(str, jobs), costs_by_two(topology, jobs, limit_s=LIMIT_S), strict=True))
    nothing = Cost(math.nan, math.nan)
    for tokens, ranks, o in points:
        us = {op: best.get(key, (nothing,))[0].us for op, key in keys[tokens, ranks, o].items()}
        base = base_us(topology, tokens, d, o, found[str(base_job(tokens, d, o))])
        ours = {
            "laned": us["lora_shrink"] + us["lora_expand"],
            "segments": us["lora_segments"],
            "fused": us["lora_shrink"] + us["lora_fused"] - base,
        }
        peers = {
            "xla": found[str(laned_job(tokens, bucket(ranks), d, o, quanta[ranks]))].us,
            "one_hot": found[str(peer_job("one_hot", tokens, ranks, d, o))].us,
            "ragged_dot": found.get(str(peer_job("ragged", tokens, ranks, d, o)), nothing).us,
        }
        rank = str(ranks[0]) if len(set(ranks)) == 1 else "mix"
        case = f"kernels/{topology.partition(':')[0]}/t{tokens}-a{len(ranks)}-r{rank}-o{o}"
        for form, value in ours.items():
            for peer, peer_value in peers.items():
                if not (math.isnan(value) or math.isnan(peer_value)):
                    emit(
                        case=case,
                        metric=f"static cost, {form}",
                        value=value,
                        unit="us",
                        peer=peer,
                        peer_value=peer_value,
                    )


SOURCE = (
    "Static costs of the TPU compiler, max(cycles / clock, bytes / bandwidth), microseconds."
    " Compiled for {name} by its real compiler, numerics checked in TPU interpret mode, never run"
    " on one. They rank kernels and are unvalidated against hardware."
)
PREFIX = {"lora_shrink": "shrink", "lora_expand": "expand", "lora_segments": "segments"}
PREFIX["lora_fused"] = "fused"


def named(op: str, size: dict[str, int]) -> Iterable[tuple[str, int]]:
    """Block sizes as a form's tuning names them; `prepare_segments` has its own block_t."""
    for name, value in size.items():
        letter = name.removeprefix("block_")
        if letter in ("t", "d", "o") and (op, letter) != ("lora_segments", "t"):
            yield f"{PREFIX[op]}_{letter}", value


def table(topology: str, out: Path) -> None:
    """Writes the table of a preset's points, by form, with the block sizes of each."""
    ranks_of: dict[int, tuple[int, ...]] = {}
    for lanes in LANES:
        active = min(ADAPTERS, lanes // QUANTUM)
        ranks_of[lanes] = (lanes // active,) * active
    pairs = tuple(dict.fromkeys((d, o) for d, wide in SITES for o in wide))
    keys = {
        (tokens, lanes, d, o): keys_of(tokens, ranks_of[lanes], d, o, QUANTUM)
        for tokens in TOKENS
        for lanes in LANES
        for d, o in pairs
    }
    best = tune(topology, (key for of in keys.values() for key in of.values()))
    jobs = [base_job(tokens, d, o) for tokens in TOKENS for d, o in pairs]
    jobs += [laned_job(*point, QUANTUM) for point in keys]
    plain = dict(zip(map(str, jobs), costs_by_two(topology, jobs, limit_s=LIMIT_S), strict=True))
    parts = {
        "tpu_laned": ("lora_shrink", "lora_expand"),
        "tpu_segments": ("lora_segments",),
        "tpu_fused": ("lora_shrink", "lora_fused"),
    }
    rows: list[dict[str, Any]] = []
    for tokens in TOKENS:
        for lanes in LANES:
            for d, wide in SITES:
                of = [keys[tokens, lanes, d, o] for o in wide]
                base = sum(
                    base_us(topology, tokens, d, o, plain[str(base_job(tokens, d, o))])
                    for o in wide
                )
                adapters = sum(plain[str(laned_job(tokens, lanes, d, o, QUANTUM))].us for o in wide)
                us = {"laned": base + adapters}
                tuning: dict[str, dict[str, int]] = {}
                for form, operations in parts.items():
                    if any(key[op] not in best for key in of for op in operations):
                        continue
                    us[form] = sum(best[key[op]][0].us for key in of for op in operations)
                    us[form] += 0 if form == "tpu_fused" else base
                    tuning[form] = {
                        name: value
                        for op in operations
                        for name, value in named(op, best[of[0][op]][1])
                    }
                us = {form: round(value, 1) for form, value in us.items() if not math.isnan(value)}
                point = {"tokens": tokens, "lanes": lanes, "d": d, "o": sum(wide)}
                rows.append({**point, "us": us, "tuning": tuning})
    hardware = topology.partition(":")[0]
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    source = json.dumps(SOURCE.format(name=hardware))
    out.write_text(
        f'{{"hardware": "{hardware}",\n "source": {source},\n "rows": [\n{lines}\n ]}}\n',
        encoding="utf-8",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v6e:1x1")
    parser.add_argument("--table", type=Path, help="tune, and write the table here")
    parser.add_argument("--only", type=int, help="that many of the points")
    options = parser.parse_args()
    if options.table:
        table(options.topology, options.table)
    else:
        for point in POINTS[: options.only]:  # One by one: each is printed when it is known.
            run(options.topology, (point,))


if __name__ == "__main__":
    main()
