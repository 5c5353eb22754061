"""Changes the axes of a config's text and nothing else: comments and layout stay."""

from __future__ import annotations

import re
from typing import Any

import yaml

from aot_lora.config.yaml_nodes import parse
from aot_lora.errors import ConfigError

Edit = tuple[int, int, str]
"""Where a text is replaced, and by what."""


def with_buckets(
    text: str,
    source: str,
    *,
    tokens: tuple[int, ...] | None = None,
    slots: tuple[int, ...] | None = None,
    ranks: tuple[int, ...] | None = None,
    quantum: int | None = None,
) -> str:
    """The text of a config with these buckets written out; None leaves an axis as it is.

    `budget` becomes the last token bucket; `smallest`, which has no meaning beside a list, goes.
    A `quantum` that is not there yet comes behind the ranks. Comments stay: those inside what is
    replaced move above its key.

    Args:
      text: the file; source: its name, for errors.
      tokens, slots, ranks: the new buckets; quantum: of the lanes, if it has to be written.

    Raises:
      ConfigError: the file has no such section that could be changed in place.
    """
    wanted: dict[str, Any] = parse(text, source).value
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    edits: list[Edit] = []
    if tokens is not None:
        section = _section(root, "tokens", ("buckets",), source)
        edits += _token_edits(text, section, tokens)
        after: dict[str, Any] = {**wanted["tokens"], "budget": tokens[-1], "buckets": list(tokens)}
        after.pop("smallest", None)
        wanted = {**wanted, "tokens": after}
    lora: dict[str, Any] = {}
    lora |= {} if slots is None else {"slots": list(slots)}
    lora |= {} if ranks is None else {"ranks": list(ranks)}
    if lora:
        section = _section(root, "lora", tuple(lora), source)
        edits += [_replacement(text, section, name, str(values)) for name, values in lora.items()]
        if quantum is not None:
            lora["quantum"] = quantum
            if _value(section, "quantum") is None:
                edits[-1] = _with_another(text, section, "ranks", edits[-1], f"quantum: {quantum}")
            else:
                edits.append(_replacement(text, section, "quantum", str(quantum)))
        wanted = {**wanted, "lora": {**wanted["lora"], **lora}}
    changed = text
    for start, end, new in sorted(edits, reverse=True):
        changed = changed[:start] + new + changed[end:]
    try:
        done = parse(changed, source).value == wanted
    except ConfigError:
        done = False
    if not done:  # anchors, merge keys and the like
        raise _cannot(source, "lora" if tokens is None else "tokens")
    return changed


def _cannot(source: str, section: str) -> ConfigError:
    shapes = {"tokens": "{budget: ..., buckets: ...}", "lora": "{ranks: ..., slots: ..., ...}"}
    return ConfigError(
        f"its `{section}:` cannot be changed in place",
        where=source,
        expected=f"`{section}: {shapes[section]}` without anchors and merges",
        next_step="write the buckets into it by hand",
    )


def _section(
    root: yaml.Node | None, name: str, keys: tuple[str, ...], source: str
) -> yaml.MappingNode:
    found = _value(root, name) if isinstance(root, yaml.MappingNode) else None
    if not isinstance(found, yaml.MappingNode) or any(_value(found, key) is None for key in keys):
        raise _cannot(source, name)
    return found


def _token_edits(text: str, section: yaml.MappingNode, buckets: tuple[int, ...]) -> list[Edit]:
    edits = [_replacement(text, section, "buckets", str(list(buckets)))]
    budget = _value(section, "budget")
    if not isinstance(budget, yaml.ScalarNode) or budget.value != str(buckets[-1]):
        edits.append(_replacement(text, section, "budget", str(buckets[-1])))
    if _value(section, "smallest") is not None:
        edits.append(_removal(text, section, "smallest"))
    return edits


def _with_another(text: str, mapping: yaml.MappingNode, name: str, edit: Edit, line: str) -> Edit:
    """The edit of a key's value, and a further key behind it."""
    start, end, new = edit
    if mapping.flow_style:
        return start, end, f"{new}, {line}"
    key = next(key for key, _ in _pairs(mapping) if key.value == name)
    rest = re.match(r"[^\r\n]*", text[end:])  # a comment behind the value
    assert rest is not None
    newline = "\r\n" if "\r\n" in text else "\n"
    indent = " " * key.start_mark.column
    return start, end + rest.end(), f"{new}{rest[0]}{newline}{indent}{line}"


def _pairs(mapping: yaml.MappingNode) -> list[tuple[yaml.Node, yaml.Node]]:
    return list(mapping.value)


def _value(mapping: yaml.MappingNode, name: str) -> yaml.Node | None:
    return next((value for key, value in _pairs(mapping) if key.value == name), None)


def _end(node: yaml.Node) -> int:
    """Where a node's own text ends; a block's mark is only behind the comments that follow it."""
    if isinstance(node, yaml.MappingNode) and not node.flow_style and node.value:
        return _end(_pairs(node)[-1][1])
    if isinstance(node, yaml.SequenceNode) and not node.flow_style and node.value:
        return _end(node.value[-1])
    return node.end_mark.index


def _replacement(text: str, mapping: yaml.MappingNode, name: str, new: str) -> Edit:
    key, value = next(pair for pair in _pairs(mapping) if pair[0].value == name)
    start, end = key.end_mark.index, _end(value)
    colon = text.index(":", start)
    comments = re.findall(r"(?<=\s)#[^\r\n]*", text[colon:end])
    if not comments:
        return start, end, f"{text[start:colon]}: {new}"
    line = text.rfind("\n", 0, key.start_mark.index) + 1
    indent = " " * (len(text[line:]) - len(text[line:].lstrip(" ")))
    newline = "\r\n" if "\r\n" in text else "\n"
    above = "".join(f"{indent}{comment}{newline}" for comment in comments)
    return line, end, f"{above}{text[line:colon]}: {new}"


def _removal(text: str, mapping: yaml.MappingNode, name: str) -> Edit:
    key, value = next(pair for pair in _pairs(mapping) if pair[0].value == name)
    start, end = key.start_mark.index, _end(value)
    if mapping.flow_style:
        following = re.match(r"\s*,[ \t]*", text[end:])
        if following:
            return start, end + following.end(), ""
        comma = text.rindex(",", 0, start)
        return (comma, end, "") if not text[comma + 1 : start].strip() else (start, end, "")
    line = text.rfind("\n", 0, start) + 1
    rest = re.match(r"[ \t]*(#[^\r\n]*)?(\r?\n)?", text[end:])
    assert rest is not None
    if text[line:start].strip():  # the key stands behind something else on its line
        return start, end, ""
    if rest[1]:
        return start, end + rest.start(1), ""
    return line, end + rest.end(), ""
