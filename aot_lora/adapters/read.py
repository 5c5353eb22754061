"""Reads an adapter's config and header, and refuses what does not fit together."""

from __future__ import annotations

import os
from pathlib import Path

from aot_lora.adapters.config import read_config
from aot_lora.adapters.files import CONFIG, WEIGHTS, check_folder
from aot_lora.adapters.header import read_header, tensor_of
from aot_lora.adapters.naming import (
    Place,
    is_lora,
    listed,
    parse_key,
    place_of,
    shown,
    wrapped_path,
)
from aot_lora.adapters.rules import Rules
from aot_lora.adapters.values import Adapter, Pair, Tensor, scale_of
from aot_lora.errors import AdapterError

_LARGEST_SCALE = 3.4e38  # scales are float32 on the device
_SMALLEST_SCALE = 1.2e-38


def read_adapter(folder: str | os.PathLike[str]) -> Adapter:
    """Reads what an adapter's files say, without its weights.

    Args:
      folder: what PEFT's `save_pretrained` wrote.

    Raises:
      AdapterError: it cannot be served, or its tensors and its config disagree.
      DamagedAdapterError: a file is missing, cut short or not what it should be.
    """
    folder = Path(folder)
    check_folder(folder)
    config, config_stamp = read_config(folder / CONFIG)
    file = folder / WEIGHTS
    where = str(file)
    entries, start, stamp = read_header(file)
    if not any(is_lora(key) for key in entries):
        raise AdapterError(
            "no LoRA tensors: this looks like a base model's weights",
            where=where,
            found=listed(entries) or "no tensors at all",
            next_step="name the folder that PEFT's save_pretrained wrote",
        )
    copies = {key: path for key in entries if (path := wrapped_path(key)) is not None}
    halves = _halves(tuple(key for key in entries if key not in copies), where)
    tensors = {
        key: tensor_of(key, entry, start=start, size=stamp[0], where=where)
        for key, entry in entries.items()
    }
    for key, path in copies.items():
        _check_copy(key, tensors, halves.get(path, {}), where)
    rules = Rules(config, where=str(folder / CONFIG))
    pairs = [
        _pair(
            path,
            place,
            tensors[keys["A"]],
            tensors[keys["B"]],
            rules,
            rslora=bool(config.use_rslora),
            where=where,
        )
        for (path, keys), place in zip(halves.items(), _places(halves, where), strict=True)
    ]
    return Adapter(
        folder=folder,
        file=file,
        base_model=config.base_model_name_or_path,
        pairs=tuple(sorted(pairs, key=_order)),
        idle=rules.idle(halves),
        copies=tuple(copies.values()),
        stamp=(config_stamp, stamp),
    )


def _check_copy(key: str, tensors: dict[str, Tensor], pair: dict[str, str], where: str) -> None:
    """Refuses a base weight that is not just a copy: of no module here, or of another size."""
    wanted = (tensors[pair["B"]].shape[0], tensors[pair["A"]].shape[1]) if pair else None
    if tuple(tensors[key].shape) != wanted:
        raise AdapterError(
            f"`{shown(key)}` is a weight of the base model that is not the adapter's module",
            where=where,
            expected=f"{list(wanted)}, as its lora_A and lora_B say"
            if wanted
            else "no such tensor",
            found=str(list(tensors[key].shape)),
            next_step="save it with PEFT's save_embedding_layers=False",
        )


def _order(pair: Pair) -> tuple[bool, int, str]:
    return pair.layer is None, pair.layer or 0, pair.path


def _halves(keys: tuple[str, ...], where: str) -> dict[str, dict[str, str]]:
    """The keys of A and B by path. One adapter, each half once, none alone."""
    halves: dict[str, dict[str, str]] = {}
    names: dict[str | None, str] = {}
    for key in keys:
        path, part, name = parse_key(key, where=where)
        names.setdefault(name, key)
        held = halves.setdefault(path, {})
        if part in held:
            raise AdapterError(
                f"`{shown(held[part])}` and `{shown(key)}` are the same tensor", where=where
            )
        held[part] = key
    if len(names) > 1:
        raise AdapterError(
            "more than one adapter in one file",
            where=where,
            expected="one name after lora_A, or none",
            found=listed(names.values()),
            next_step="save each adapter on its own",
        )
    for path, held in halves.items():
        if len(held) == 1:
            (part,) = held
            raise AdapterError(
                f"`{shown(path)}` has lora_{part} but no lora_{'B' if part == 'A' else 'A'}",
                where=where,
                expected="both",
            )
    return halves


def _places(paths: dict[str, dict[str, str]], where: str) -> list[Place]:
    """Where each module is: all in one stack of layers, no two in the same place."""
    stacks: dict[str, str] = {}
    taken: dict[tuple[str, int | None], str] = {}
    places: list[Place] = []
    for path in paths:
        place = place_of(path, where=where)
        if place.stack is not None:
            stacks.setdefault(place.stack, path)
        other = taken.setdefault((place.module, place.layer), path)
        if other != path and len(stacks) < 2:
            raise AdapterError(
                f"`{shown(other)}` and `{shown(path)}` are both `{shown(place.module)}`"
                + ("" if place.layer is None else f" of layer {place.layer}"),
                where=where,
                expected="one module of a name in each layer",
            )
        places.append(place)
    if len(stacks) > 1:
        raise AdapterError(
            "modules of more than one stack of layers",
            where=where,
            expected="one, as `model.layers`",
            found=listed(stacks),
            next_step="train without the other towers among target_modules",
        )
    return places


def _pair(
    path: str, place: Place, a: Tensor, b: Tensor, rules: Rules, *, rslora: bool, where: str
) -> Pair:
    rank = a.shape[0]
    if b.shape[1] != rank:
        raise AdapterError(
            f"A and B of `{shown(path)}` have different ranks",
            where=where,
            expected="A [R, D] and B [O, R]",
            found=f"A {list(a.shape)} and B {list(b.shape)}",
        )
    objection = rules.objection(path)
    if objection:
        raise AdapterError(
            f"config and tensors disagree about `{shown(path)}`",
            where=where,
            expected=f"no tensors for it: {objection}",
            found=f"A {list(a.shape)} and B {list(b.shape)}",
        )
    configured = rules.rank_of(path)
    if configured != rank:
        raise AdapterError(
            f"config and tensors disagree about the rank of `{shown(path)}`",
            where=where,
            expected=f"{configured}, as {CONFIG} says",
            found=f"{rank}: A {list(a.shape)} and B {list(b.shape)}",
        )
    scale = scale_of(alpha=rules.alpha_of(path), rank=rank, rslora=rslora)
    if not _SMALLEST_SCALE <= abs(scale) <= _LARGEST_SCALE:
        raise AdapterError(
            f"the scale of `{shown(path)}` is {scale:g}",
            where=where,
            expected="a float32" if scale else "not 0: the adapter would silently do nothing",
            next_step="look at lora_alpha and alpha_pattern",
        )
    return Pair(path=path, module=place.module, layer=place.layer, rank=rank, scale=scale, a=a, b=b)
