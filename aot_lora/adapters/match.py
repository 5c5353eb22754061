"""Which banks of a plan an adapter fills, and how: each pair directly, split or joined."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aot_lora.adapters.fused import QKV, UNKNOWN_LAYOUTS, Part, joined, parts_of, split, whole_of
from aot_lora.adapters.naming import listed, shown
from aot_lora.adapters.values import Adapter, Pair
from aot_lora.errors import AdapterError
from aot_lora.plan import Module, Plan

Place = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMatch:
    """How an adapter fills the banks of one module of the plan.

    Args:
      name: the module.
      how: ``direct``, ``split`` (from a fused module of the adapter) or ``joined`` (into one).
      sources: the adapter's modules that it comes from.
      layers: the layers that it changes, sorted; others get nothing.
      ranks: smallest and largest rank, after joining.
    """

    name: str
    how: str
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    ranks: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """An adapter that a plan serves, whole.

    Args:
      rank: the largest, after joining.
      lanes: the plan's bucket for it.
      modules: what is filled, in the plan's order.
      parts: what goes to each (module, layer).
    """

    rank: int
    lanes: int
    modules: tuple[ModuleMatch, ...]
    parts: dict[Place, tuple[Part, ...]]


def match(adapter: Adapter, plan: Plan) -> Match:
    """Finds the banks for every pair of an adapter. Reads no weights.

    Raises:
      AdapterError: the plan does not serve all of it: a module, a layer, a shape or a rank.
    """
    return match_pairs(adapter.pairs, plan, where=str(adapter.file))


def match_pairs(pairs: Iterable[Pair], plan: Plan, *, where: str) -> Match:
    """As `match`, for the pairs of any source. `where` is what errors name."""
    pairs = tuple(pairs)
    modules = {module.name: module for module in plan.modules} if plan.with_lora else {}
    _check_served(pairs, modules, where)
    groups: dict[Place, list[tuple[str, Pair]]] = {}
    for pair in pairs:
        for how, name in _routes(pair.module, modules):
            layer = _layer(pair, modules[name], plan, where)
            groups.setdefault((name, layer), []).append((how, pair))
    parts = {place: _parts(place, group, modules, where) for place, group in groups.items()}
    hows: dict[str, list[str]] = {}
    for (name, _), group in groups.items():
        hows.setdefault(name, []).extend(how for how, _ in group)
    rank = _check_ranks(parts, plan, where)
    return Match(
        rank=rank,
        lanes=plan.adapter_lanes.bucket(rank),
        modules=tuple(
            _summary(module.name, hows[module.name], parts)
            for module in plan.modules
            if module.name in hows
        ),
        parts=parts,
    )


def _parts(
    place: Place, group: list[tuple[str, Pair]], modules: dict[str, Module], where: str
) -> tuple[Part, ...]:
    """What goes to one module in one layer."""
    module = modules[place[0]]
    hows = {how for how, _ in group}
    pairs = [pair for _, pair in group]
    if len(pairs) > 1 and (hows != {"joined"} or len({p.module for p in pairs}) < len(pairs)):
        raise AdapterError(
            f"more than one module fills `{module.name}` of layer {place[1]}",
            where=where,
            found=listed(pair.path for pair in pairs),
        )
    for pair in pairs:
        _check_shape("A", pair, module, pair.a.shape, (pair.rank, module.d), where)
    if "joined" in hows:
        return joined(tuple(pairs), module, where=where)
    pair = pairs[0]
    if "split" in hows:
        return (split(pair, module, modules, where=where),)
    _check_shape("B", pair, module, pair.b.shape, (module.o, pair.rank), where)
    return (Part(pair=pair, first_row=0, rows=module.o),)


def _routes(name: str, modules: dict[str, Module]) -> list[tuple[str, str]]:
    """(how, module of the plan) for everything that a module of the adapter fills."""
    if name in modules:
        return [("direct", name)]
    halves = [part for part in parts_of(name) if part in modules]
    if halves:
        return [("split", part) for part in halves]
    whole = whole_of(name)
    return [("joined", whole)] if whole in modules else []


def _check_served(pairs: tuple[Pair, ...], modules: dict[str, Module], where: str) -> None:
    """Half an adapter is another adapter: all of its modules are served, or none."""
    lost: dict[str, str] = {}
    for pair in pairs:
        missing = [part for part in parts_of(pair.module) if part not in modules]
        if not _routes(pair.module, modules):
            lost[pair.module] = pair.module
        elif pair.module not in modules and missing:
            lost[pair.module] = f"{', '.join(missing)} of {pair.module}"
    if not lost:
        return
    serves = listed(modules) or "none, as it lists no slots above 0"
    unknown = UNKNOWN_LAYOUTS.intersection(lost)
    if unknown and not modules.keys().isdisjoint(QKV):
        raise AdapterError(
            f"`{min(unknown)}` is fused, and the order of its rows differs between models",
            where=where,
            expected=f"modules of the plan: {serves}",
            found=listed(pair.module for pair in pairs),
            next_step="serve that module itself, or convert the adapter to the plan's",
        )
    applying = sum(pair.module not in lost for pair in pairs)
    half = f"; without {listed(lost.values())} it would be another adapter" if applying else ""
    raise AdapterError(
        f"{applying} of {len(pairs)} modules apply{half}",
        where=where,
        expected=f"only modules of the plan: {serves}",
        found=listed(pair.module for pair in pairs) if applying else listed(lost.values()),
        next_step="add them to lora.modules and warm up",
    )


def _layer(pair: Pair, module: Module, plan: Plan, where: str) -> int:
    """The layer of the bank. A module outside the layers has one bank, which is layer 0."""
    alone = module.layers == 1 and plan.layers > 1
    if pair.layer is None and module.layers == 1:
        return 0
    if pair.layer is None or alone or pair.layer >= module.layers:
        raise AdapterError(
            f"no bank for `{shown(pair.path)}`",
            where=where,
            expected=f"`{module.name}` outside the layers"
            if alone
            else f"`{module.name}` of layers 0 to {module.layers - 1}",
            found="no layer number" if pair.layer is None else f"layer {shown(str(pair.layer))}",
            next_step="check that the adapter and the config are for the same model",
        )
    return pair.layer


def _check_shape(
    half: str,
    pair: Pair,
    module: Module,
    found: tuple[int, int],
    wanted: tuple[int, int],
    where: str,
) -> None:
    if found != wanted:
        raise AdapterError(
            f"{half} of `{shown(pair.path)}` does not fit `{module.name}`",
            where=where,
            expected=f"{list(wanted)}: the plan's is D {module.d}, O {module.o}",
            found=str(list(found)),
            next_step="check that the adapter and the config are for the same model",
        )


def _check_ranks(parts: dict[Place, tuple[Part, ...]], plan: Plan, where: str) -> int:
    largest = plan.adapter_lanes.buckets[-1]
    highest = 0
    for (name, _), filled in parts.items():
        rank = sum(part.pair.rank for part in filled)
        if rank > largest:
            paths = " and ".join(f"`{shown(part.pair.path)}`" for part in filled)
            joint = f", joined into `{name}`," if len(filled) > 1 else ""
            raise AdapterError(
                f"{paths}{joint} has rank {rank} > {largest}, the largest",
                where=where,
                expected=f"at most {largest}",
                found=str(rank),
                next_step=f"add {rank} to lora.ranks and warm up",
            )
        highest = max(highest, rank)
    return highest


def _summary(name: str, hows: list[str], parts: dict[Place, tuple[Part, ...]]) -> ModuleMatch:
    filled = {layer: part for (module, layer), part in parts.items() if module == name}
    ranks = [sum(part.pair.rank for part in group) for group in filled.values()]
    sources = (part.pair.module for group in filled.values() for part in group)
    return ModuleMatch(
        name=name,
        how=" and ".join(dict.fromkeys(hows)),
        sources=tuple(dict.fromkeys(sources)),
        layers=tuple(sorted(filled)),
        ranks=(min(ranks), max(ranks)),
    )
