"""Names from a file that nobody vouches for: how they are shown, and what they mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from aot_lora.errors import AdapterError

_SHOWN = 96
_LISTED = 6
_PREFIX = "base_model.model."
_KEY = re.compile(r"(?P<path>.+)\.lora_(?P<part>[AB])(\.(?P<adapter>[^.]+))?\.weight", re.DOTALL)
_PATH = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_LONGEST = 512  # No model's module has a name near that; the matching of patterns relies on it.
_STACKS = frozenset(("layers", "layer", "h", "blocks", "block"))

# What a key that is not A or B of a linear layer may be: how to tell, and what it is called.
_OTHERS = (
    (re.compile(r"(^|\.)lora_embedding_[AB]"), "LoRA of an embedding"),
    (re.compile(r"(^|\.)lora_magnitude_vector"), "DoRA"),
    (re.compile(r"(^|\.)modules_to_save\."), "a module saved whole (modules_to_save)"),
    (re.compile(r"(^|\.)lora_[AB]\..*bias$"), "LoRA with a bias (lora_bias)"),
)


class Key(NamedTuple):
    """A tensor's key, read: the module's path, ``A`` or ``B``, and the adapter's name if given."""

    path: str
    part: str
    adapter: str | None


class Place(NamedTuple):
    """Where a path is: its module, its layer, and the name of the stack of layers."""

    module: str
    layer: int | None
    stack: str | None


def shown(text: str) -> str:
    """`text` in ASCII without control characters, and never long: fit for a terminal and a log."""
    escaped = ascii(text)[1:-1]
    return escaped if len(escaped) <= _SHOWN else f"{escaped[: _SHOWN - 23]}...{escaped[-20:]}"


def listed(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - _LISTED} more" if len(distinct) > _LISTED else ""
    return ", ".join(shown(name) for name in distinct[:_LISTED]) + more


def is_lora(key: str) -> bool:
    """Whether a key belongs to a LoRA adapter at all, of whatever kind."""
    return ".lora_" in key


def wrapped_path(key: str) -> str | None:
    """The module whose frozen weight a tensor is, or None where it is another tensor.

    PEFT saves the base's own weight beside the adapter of an embedding or of lm_head.
    """
    path = key.removesuffix(".base_layer.weight")
    return None if path == key else path.removeprefix(_PREFIX)


def parse_key(key: str, *, where: str) -> Key:
    """Reads a key such as ``base_model.model.<path>.lora_A.default.weight``.

    The prefix and the adapter's name may be absent.

    Raises:
      AdapterError: it is not the A or B of a linear layer; says what it is.
    """
    found = _KEY.fullmatch(key)
    if found is None or "modules_to_save" in key:
        kind = next((kind for mark, kind in _OTHERS if mark.search(key)), None)
        raise AdapterError(
            f"`{shown(key)}` is {f'{kind}, which cannot be served' if kind else 'no LoRA tensor'}",
            where=where,
            expected="only <module>.lora_A.weight and <module>.lora_B.weight",
            next_step="train or convert the adapter to plain LoRA of linear layers",
        )
    path = found["path"].removeprefix(_PREFIX)
    if len(path) > _LONGEST or not _PATH.fullmatch(path):
        raise AdapterError(
            f"`{shown(key)}` names no module",
            where=where,
            expected=f"names joined by dots, at most {_LONGEST} characters",
        )
    return Key(path, found["part"], found["adapter"])


def place_of(path: str, *, where: str) -> Place:
    """Where a module is, from its path.

    Raises:
      AdapterError: it belongs to an expert, or stands in layers within layers.
    """
    parts = path.split(".")
    if "experts" in parts:
        raise AdapterError(
            f"`{shown(path)}` belongs to an expert (mixture of experts), which cannot be served",
            where=where,
            next_step="train without the experts among target_modules",
        )
    stacks = [
        index
        for index in range(1, len(parts))
        if parts[index].isdigit() and parts[index - 1] in _STACKS
    ]
    if len(stacks) > 1:
        raise AdapterError(
            f"`{shown(path)}` stands in layers within layers: which number is the layer?",
            where=where,
            expected="one number after " + ", ".join(sorted(_STACKS)),
        )
    if not stacks:
        return Place(parts[-1], None, None)
    (index,) = stacks
    return Place(parts[-1], int(parts[index]), ".".join(parts[:index]))
