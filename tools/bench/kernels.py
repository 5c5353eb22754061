"""Forms of lora_project against each other inside one program, checked before they are timed.

    python tools/bench/kernels.py forms --platform cuda
    python tools/bench/kernels.py forms --platform cuda --points 128/4096/8/r16 2048/14336/32/r64
    python tools/bench/kernels.py forms --platform cuda --vllm DIR
    python tools/bench/kernels.py table LINES...
    python tools/bench/kernels.py resident --platform cuda

`forms`: what adapters cost on top of the base projection, each form against the best of what
published systems do (one_hot, gather, ragged, and laned in plain XLA), and base and adapters
against the base alone. Decode batches have random adapters, prompts come in runs. Goals on an H200:
never slower than the best baseline; 8 adapters of rank 16 at most +8 % at 16 and 128 tokens, +6 %
at 2,048 and 8,192. With --vllm its Triton kernels, tuned, take their turn; goal 0.6 of them.
`table`: what `forms` printed, as a table; later lines of a point replace earlier ones.
`resident`: one active adapter among 32 resident ones against one alone. Goal: the same.

`kernels_tpu.py` is the same for a TPU that is not there, by the compiler's static costs.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

import kernels_vllm
import numpy as np
from lines import emit, note

_D = 4096
_MIX = (8, 16, 32, 64, 128)
_RANKS = {"r16": (16,), "r64": (64,), "r8..128": _MIX}
_BASELINES = ("laned", "one_hot", "gather", "ragged")
_OURS = ("one_launch", "extended")
_ALONE, _FLOOR = "the base alone", "floor of an H200's bytes and FLOPs"
_VLLM, _TORCH = "vLLM's kernels, tuned", "PyTorch's"
# One H200, measured there: a copy's bytes, and a large bf16 matmul.
_H200_BYTES, _H200_FLOPS = 4.3e12, 790e12


def forms(options: argparse.Namespace) -> None:
    """Every form at every point."""
    from aot_lora.kernels.forms import FORMS
    from aot_lora.tuning.measure import measure
    from aot_lora.tuning.table import candidates

    wanted = candidates(options.form or tuple(FORMS))
    grid = {
        f"t{tokens}-o{outputs}-{adapters}x{ranks}": _point(
            options, tokens, outputs, adapters, _RANKS[ranks]
        )
        for tokens, outputs, adapters, ranks in options.points
        or product(options.tokens, options.outputs, options.adapters, options.ranks)
    }
    vllm = None
    if options.vllm:
        vllm = kernels_vllm.Peer(options.vllm)
        vllm.compile(grid.values())
    for label, point in grid.items():
        others = vllm.chains(point) if vllm else {}
        timed = measure(point, wanted, platform=options.platform, others=others)
        case = f"kernels/{options.platform}/{label}"
        for form, why in timed.refused.items():
            note(f"{case}: not {form}: {why}")
        floor = _floor(point) * 1e6 if options.platform == "cuda" else None
        _tell(case, timed, {label: timed.forms.pop(label) for label in others}, floor)


def _tell(case: str, timed: Any, vllm: dict[str, float], floor: float | None) -> None:
    """Prints what adapters add in each form, and the fastest beside its peers."""
    base = timed.base - timed.link
    best = _best({form: us - timed.base for form, us in timed.forms.items()})
    if not best:
        return
    note(f"{case}: fastest of all {min(timed.forms, key=lambda name: timed.forms[name])}")
    baselines = {name: us for name, us in best.items() if name in _BASELINES}
    peer = min(baselines, key=lambda name: baselines[name], default="")
    for name, us in best.items():
        emit(
            case=case,
            metric=f"{name}: adapters on top of the base",
            value=us,
            unit="us",
            peer=f"best baseline, {peer}" if peer else None,
            peer_value=baselines.get(peer),
        )
    fastest = min(best, key=lambda name: best[name])
    both = f"base and adapters, {fastest}"
    rows = [(both, base + best[fastest], _ALONE, base)]
    if floor:
        rows.append((both, base + best[fastest], _FLOOR, floor))
    if vllm:
        alone, pair = vllm[kernels_vllm.BASE], vllm[kernels_vllm.PAIR]
        added = f"{fastest}: adapters on top of the base"
        rows.append((added, best[fastest], _VLLM, pair - alone))
        rows.append((_ALONE, base, _TORCH, alone))
        rows.append((both, base + best[fastest], "PyTorch's base and vLLM's kernels", pair))
    for metric, value, other, other_value in rows:
        emit(case=case, metric=metric, value=value, unit="us", peer=other, peer_value=other_value)


def table(options: argparse.Namespace) -> None:
    """What adapters cost at each point, in microseconds; the least in bold."""
    points: dict[str, dict[str, float]] = {}
    for path in options.lines:
        for line in map(json.loads, path.read_text(encoding="utf-8").splitlines()):
            point = points.setdefault(line["case"], {})
            form, _, added = line["metric"].partition(": ")
            if added:
                point[form] = line["value"]
            peer = line.get("peer")
            if peer == _ALONE:
                point |= {"base": line["peer_value"], "all of it": line["value"]}
            elif peer in (_FLOOR, _VLLM, _TORCH):
                point[peer] = line["peer_value"]
    costs = {**{form: form for form in (*_BASELINES, *_OURS)}, "vLLM": _VLLM}
    columns = {"base": "base", _TORCH: _TORCH, **costs, "all of it": "all of it", "floor": _FLOOR}
    print("| T, O, adapters |", " | ".join(columns), "|")
    print("|---" * (1 + len(columns)) + "|")
    for case, point in points.items():
        least = min(point[name] for name in costs.values() if name in point)
        cells = []
        for name in columns.values():
            value = point.get(name)
            cell = "-" if value is None else f"{value:,.{0 if abs(value) >= 100 else 1}f}"
            cells.append(f"**{cell}**" if name in costs.values() and value == least else cell)
        tokens, outputs, adapters = case.rpartition("/")[2].split("-", 2)
        label = f"{tokens[1:]}, {outputs[1:]}, {adapters.replace('x', ' x ')}"
        print("|", " | ".join((label, *cells)), "|")


def resident(options: argparse.Namespace) -> None:
    """One active adapter among many resident ones."""
    from aot_lora.kernels.forms import FORMS
    from aot_lora.tuning.measure import measure
    from aot_lora.tuning.table import candidates

    wanted = candidates(options.form or tuple(FORMS))
    for tokens, outputs in product(options.tokens, options.outputs):
        alone = _point(options, tokens, outputs, 1, (64,))
        among = _point(options, tokens, outputs, 1, (64,), resident=31)
        timed = [measure(point, wanted, platform=options.platform) for point in (alone, among)]
        single, crowded = (_best(one.forms) for one in timed)
        for name in single.keys() & crowded.keys():
            emit(
                case=f"kernels/{options.platform}/resident-t{tokens}-o{outputs}",
                metric=f"{name}: base and 1 active adapter, 31 more resident",
                value=crowded[name] - timed[1].link,
                unit="us",
                peer="no others resident",
                peer_value=single[name] - timed[0].link,
            )


def _point(
    options: argparse.Namespace,
    tokens: int,
    outputs: int,
    adapters: int,
    ranks: tuple[int, ...],
    resident: int = 0,
) -> Any:
    from aot_lora.tuning.measure import Point

    return Point(
        tokens=tokens,
        d=options.inputs,
        o=(outputs,),
        ranks=tuple(ranks[n % len(ranks)] for n in range(adapters)),
        resident=resident,
        block=16,
        dtype="float32" if options.platform == "cpu" else "bfloat16",
    )


def _best(times: dict[str, float]) -> dict[str, float]:
    """The best tuning of each form."""
    found: dict[str, float] = {}
    for label, us in times.items():
        name = label.partition("#")[0]
        found[name] = min(us, found.get(name, us))
    return found


def _floor(point: Any) -> float:
    """Seconds that an H200 needs for the bytes or the FLOPs of base and adapters, the larger.

    Of adapters those count that a row has.
    """
    from aot_lora.tuning.measure import slots_of

    slots, ranks = slots_of(point), np.multiply(point.counts, point.quantum)
    tokens, d, o = point.tokens, point.d, sum(point.o)
    moved = 2 * (tokens * (d + o) + d * o + ranks[np.unique(slots)].sum() * (d + o))
    work = 2 * (tokens * d * o + ranks[slots].sum() * (d + o))
    return max(moved / _H200_BYTES, work / _H200_FLOPS)


def _listed(text: str) -> tuple[Any, ...]:
    """Tokens, outputs, adapters and ranks, a key of `_RANKS`."""
    *numbers, ranks = text.split("/")
    if len(numbers) == 3 and all(map(str.isdigit, numbers)) and ranks in _RANKS:
        return *map(int, numbers), ranks
    expected = f"such as 128/4096/8/r16, ranks one of {', '.join(_RANKS)}"
    raise argparse.ArgumentTypeError(f"{text}: expected {expected}")


def main() -> None:
    """Picks the part to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    for name, run in (("forms", forms), ("resident", resident)):
        part = parts.add_parser(name)
        part.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
        part.add_argument("--form", action="append", help="all unless given")
        part.add_argument("--inputs", type=int, default=_D)
        part.add_argument("--outputs", type=int, nargs="+", default=(4096, 14336))
        part.add_argument("--tokens", type=int, nargs="+", default=(1, 16, 128, 2048, 8192))
        part.set_defaults(run=run)
        if name == "forms":
            part.add_argument("--adapters", type=int, nargs="+", default=(1, 8, 32))
            part.add_argument("--ranks", nargs="+", choices=_RANKS, default=tuple(_RANKS))
            part.add_argument(
                "--points",
                nargs="+",
                type=_listed,
                metavar="TOKENS/OUTPUTS/ADAPTERS/RANKS",
                help="these instead of all",
            )
            part.add_argument("--vllm", type=Path, metavar="DIR", help="see kernels_vllm.py")
    part = parts.add_parser("table")
    part.add_argument("lines", nargs="+", type=Path, help="files of what `forms` printed")
    part.set_defaults(run=table)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
