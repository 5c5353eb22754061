"""`aot-lora adapters`: what does an adapter hold, and would a config serve it?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any

import click

from aot_lora.adapters import Adapter, Match, Pair, match, read_adapter
from aot_lora.adapters.naming import listed, shown
from aot_lora.cli.options import FORMATS, emit, read_config, size, table
from aot_lora.config import Config
from aot_lora.plan import round_up

_OUTSIDE = "outside"


@click.group()
def command() -> None:
    """Show what an adapter holds, and what of it a config would serve."""


@command.command()
@click.argument("folder", metavar="DIR")
@click.option("--config", metavar="CONFIG", help="Say whether this config serves it, and how.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="human")
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
def inspect(folder: str, config: str | None, form: str, debug: bool) -> None:
    """Show the PEFT adapter in DIR: modules, ranks, scales, layers. Reads no weights."""
    del debug
    adapter = read_adapter(folder)
    loaded = read_config(config, None) if config is not None else None
    if form == "json":
        emit(_facts(adapter) | {"config": _fit(adapter, loaded) if loaded else None})
        return
    _show(adapter)
    if loaded is not None:
        _show_fit(adapter, loaded)


def _by_module(adapter: Adapter) -> dict[str, list[Pair]]:
    modules: dict[str, list[Pair]] = {}
    for pair in adapter.pairs:
        modules.setdefault(pair.module, []).append(pair)
    return modules


def _dtypes(adapter: Adapter) -> list[str]:
    return sorted({half.dtype for pair in adapter.pairs for half in (pair.a, pair.b)})


def _layers(pairs: Iterable[Pair]) -> list[int]:
    return sorted({pair.layer for pair in pairs if pair.layer is not None})


def _bytes(pairs: Iterable[Pair]) -> int:
    return sum(pair.a.nbytes + pair.b.nbytes for pair in pairs)


def _facts(adapter: Adapter) -> dict[str, Any]:
    return {
        "adapter": str(adapter.folder),
        "base_model": adapter.base_model,
        "dtypes": _dtypes(adapter),
        "file_bytes": adapter.stamp[-1][0],
        "rank": adapter.rank,
        "layers": _layers(adapter.pairs),
        "modules": [
            {
                "module": name,
                "ranks": sorted({pair.rank for pair in pairs}),
                "scales": sorted({pair.scale for pair in pairs}),
                "layers": _layers(pairs),
                "bytes": _bytes(pairs),
            }
            for name, pairs in _by_module(adapter).items()
        ],
        "without_tensors": list(adapter.idle),
        "base_copies": list(adapter.copies),
    }


def _fit(adapter: Adapter, config: Config) -> dict[str, Any]:
    found, plan = match(adapter, config.plan), config.plan
    owned = round_up(found.rank, plan.quantum)
    return {
        "path": str(config.path),
        "rank": found.rank,
        "lanes": owned,
        "blocks": owned // plan.quantum,
        "bank_bytes": _bank_bytes(config, owned),
        "modules": [
            {
                "module": module.name,
                "how": module.how,
                "from": list(module.sources),
                "layers": list(module.layers),
                "ranks": list(module.ranks),
            }
            for module in found.modules
        ],
    }


def _bank_bytes(config: Config, lanes: int) -> int:
    """Of the banks of all modules: an adapter owns the same lanes in each, used or not."""
    plan = config.plan
    return plan.bank_bytes // (plan.bank_blocks * plan.quantum) * lanes


def _show(adapter: Adapter) -> None:
    base = f" for {shown(adapter.base_model)}" if adapter.base_model else ""
    print(f"{adapter.folder}: LoRA{base}")
    print(
        f"rank {_span(pair.rank for pair in adapter.pairs)}, "
        f"scale {_span(pair.scale for pair in adapter.pairs)}, "
        f"layers {_runs(_layers(adapter.pairs)) or 'none'}; "
        f"{len(adapter.pairs)} modules of {' and '.join(_dtypes(adapter))} in "
        f"{size(adapter.stamp[-1][0])}"
    )
    rows = [
        (
            shown(name),
            _span(pair.rank for pair in pairs),
            _span(pair.scale for pair in pairs),
            _runs(_layers(pairs)) or _OUTSIDE,
            _shapes(pairs),
            size(_bytes(pairs)),
        )
        for name, pairs in _by_module(adapter).items()
    ]
    table("modules", ("module", "rank", "scale", "layers", "D -> O", "bytes"), rows)
    if adapter.idle:
        print(f"targeted, but without tensors: {listed(adapter.idle)}; they keep the base")
    if adapter.copies:
        print(f"beside them the base's own weight of {listed(adapter.copies)}: not read")


def _show_fit(adapter: Adapter, config: Config) -> None:
    found, plan = match(adapter, config.plan), config.plan
    owned = round_up(found.rank, plan.quantum)
    print(
        f"{config.path} serves all of it: rank {found.rank} takes {owned} lanes, "
        f"{owned // plan.quantum} of {plan.bank_blocks - 1} blocks, "
        f"{size(_bank_bytes(config, owned))} of the banks"
    )
    rows = [
        (
            module.name,
            module.how + _origin(module.name, module.sources),
            _span(module.ranks),
            _runs(list(module.layers)) if _stacked(found, module.name) else _OUTSIDE,
        )
        for module in found.modules
    ]
    table("banks", ("module", "filled", "rank", "layers"), rows)
    untouched = [m.name for m in plan.modules if m.name not in {f.name for f in found.modules}]
    if untouched:
        print(f"served, but not in this adapter: {listed(untouched)}; they keep the base")


def _stacked(found: Match, name: str) -> bool:
    """Whether the module stands in the layers, by where its pairs say they are."""
    places = (parts for (module, _), parts in found.parts.items() if module == name)
    return any(part.pair.layer is not None for parts in places for part in parts)


def _origin(name: str, sources: tuple[str, ...]) -> str:
    return "" if sources == (name,) else f" from {', '.join(sources)}"


def _span(values: Iterable[float]) -> str:
    distinct = sorted(set(values))
    low, high = f"{distinct[0]:g}", f"{distinct[-1]:g}"
    return low if low == high else f"{low} to {high}"


def _shapes(pairs: Iterable[Pair]) -> str:
    shapes = dict.fromkeys(f"{pair.a.shape[1]} -> {pair.b.shape[0]}" for pair in pairs)
    return listed(shapes)


def _runs(numbers: list[int]) -> str:
    """``0-31``, or ``0-3, 5, 8-9``."""
    runs: list[str] = []
    for _, group in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return listed(runs)
