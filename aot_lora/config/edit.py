"""Changes the tokens axis of a config's text and nothing else: comments and layout stay."""

from __future__ import annotations

import re
from typing import Any

import yaml

from aot_lora.config.yaml_nodes import parse
from aot_lora.errors import ConfigError


def with_token_buckets(text: str, source: str, buckets: tuple[int, ...]) -> str:
    """The text of a config with these token buckets written out.

    `budget` becomes the last bucket; `smallest`, which has no meaning beside a list, goes. Comments
    stay: those inside what is replaced move above its key.

    Args:
      text: the file; source: its name, for errors.
      buckets: the new ones.

    Raises:
      ConfigError: the file has no `tokens:` mapping that could be changed in place.
    """
    before = parse(text, source).value
    root = yaml.compose(text, Loader=yaml.SafeLoader)
    tokens = _value(root, "tokens") if isinstance(root, yaml.MappingNode) else None
    if not isinstance(tokens, yaml.MappingNode) or _value(tokens, "buckets") is None:
        raise _cannot(source)
    listed = f"[{', '.join(map(str, buckets))}]"
    edits = [_replacement(text, tokens, "buckets", listed)]
    budget = _value(tokens, "budget")
    if not isinstance(budget, yaml.ScalarNode) or budget.value != str(buckets[-1]):
        edits.append(_replacement(text, tokens, "budget", str(buckets[-1])))
    if _value(tokens, "smallest") is not None:
        edits.append(_removal(text, tokens, "smallest"))
    after = text
    for start, end, new in sorted(edits, reverse=True):
        after = after[:start] + new + after[end:]
    section: dict[str, Any] = {**before["tokens"], "budget": buckets[-1], "buckets": list(buckets)}
    section.pop("smallest", None)
    try:
        done = parse(after, source).value == {**before, "tokens": section}
    except ConfigError:
        done = False
    if not done:  # anchors, merge keys and the like
        raise _cannot(source)
    return after


def _cannot(source: str) -> ConfigError:
    return ConfigError(
        "its `tokens:` cannot be changed in place",
        where=source,
        expected="`tokens: {budget: ..., buckets: ...}` without anchors and merges",
        next_step="write the buckets into it by hand",
    )


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


def _replacement(text: str, mapping: yaml.MappingNode, name: str, new: str) -> tuple[int, int, str]:
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


def _removal(text: str, mapping: yaml.MappingNode, name: str) -> tuple[int, int, str]:
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
