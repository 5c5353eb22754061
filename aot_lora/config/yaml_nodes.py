"""YAML with places: plain values beside the line and column that each came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import yaml

from aot_lora.errors import ConfigError

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A parsed YAML file.

    Args:
      source: the file's name as the user gave it.
      value: dicts, lists and scalars.
      marks: (line, column), from 1, of each value and key by its path.
    """

    source: str
    value: Any
    marks: dict[Path, tuple[int, int]] = field(default_factory=dict)

    def mark(self, path: Path) -> tuple[int, int]:
        """(line, column) of the deepest known part of `path`."""
        while path and path not in self.marks:
            path = path[:-1]
        return self.marks.get(path, (1, 1))

    def place(self, path: Path) -> str:
        """``file:line:column`` of the deepest known part of `path`."""
        line, column = self.mark(path)
        return f"{self.source}:{line}:{column}"


def parse(text: str, source: str) -> Document:
    """Parses YAML; refuses broken syntax, duplicate keys and keys that are no strings.

    Raises:
      ConfigError: with file, line and column.
    """
    document = Document(source=source, value=None)
    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        value = _construct(loader, root, (), document) if root is not None else None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError(
            f"not valid YAML: {error.problem or error.context}",
            where=place,
            next_step="mend the syntax at this place",
        ) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            f"not valid YAML: character U+{error.character:04X} is not allowed",
            where=f"{source}:{line}:{column}",
            next_step="remove it",
        ) from None
    except RecursionError:
        raise ConfigError("nested too deeply, or an alias of itself", where=source) from None
    return Document(source=source, value=value, marks=document.marks)


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: Path, document: Document) -> Any:
    document.marks.setdefault(path, (node.start_mark.line + 1, node.start_mark.column + 1))
    if isinstance(node, yaml.SequenceNode):
        return [
            _construct(loader, item, (*path, index), document)
            for index, item in enumerate(node.value)
        ]
    if not isinstance(node, yaml.MappingNode):
        return _scalar(loader, node)
    mapping: dict[str, Any] = {}
    for key_node, value_node in node.value:
        key = _scalar(loader, key_node)
        mark = (key_node.start_mark.line + 1, key_node.start_mark.column + 1)
        place = f"{document.source}:{mark[0]}:{mark[1]}"
        if not isinstance(key, str):
            raise ConfigError(
                "a key that is not a string", where=place, expected="a name", found=repr(key)
            )
        if key in mapping:
            first = document.place((*path, key))
            raise ConfigError(
                f"duplicate key `{key}`",
                where=place,
                expected="each key once",
                found=f"it stands already at {first}",
                next_step="remove one of the two",
            )
        document.marks[(*path, key)] = mark
        mapping[key] = _construct(loader, value_node, (*path, key), document)
    return mapping


def _scalar(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    try:
        return loader.construct_object(node)  # pyright: ignore[reportUnknownMemberType]
    except ValueError as error:  # For instance the date 2020-99-99.
        raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from None
