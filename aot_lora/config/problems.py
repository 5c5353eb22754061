"""Turns pydantic's findings into errors with place, expected, found and next step."""

from __future__ import annotations

import difflib
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from aot_lora.config import schema
from aot_lora.config.yaml_nodes import Document, Path
from aot_lora.errors import ConfigError

Model = TypeVar("Model", bound=BaseModel)


def validate(model: type[Model], document: Document) -> Model:
    """Validates a parsed file.

    Raises:
      ConfigError: with the place of the first problem and a line for each other one.
    """
    if not isinstance(document.value, dict):
        raise ConfigError(
            "not a config",
            where=document.place(()),
            expected="a mapping such as `model: llama-3.1-8b`",
            found="an empty file" if document.value is None else type(document.value).__name__,
        )
    try:
        return model.model_validate(document.value)
    except ValidationError as error:
        raise _config_error(document, error.errors(include_url=False)) from None


def _config_error(document: Document, details: list[ErrorDetails]) -> ConfigError:
    by_path: dict[Path, list[ErrorDetails]] = {}
    for detail in details:
        by_path.setdefault(_document_path(document.value, detail), []).append(detail)
    # A union reports every branch that failed; the branch that got furthest is the one meant.
    paths = [p for p in by_path if not any(q[: len(p)] == p and q != p for q in by_path)]
    # A misspelt key first: it explains the missing one.
    paths.sort(
        key=lambda path: (by_path[path][0]["type"] != "extra_forbidden", document.mark(path))
    )
    errors = [_one(document, path, by_path[path]) for path in paths]
    first = errors[0]
    if len(errors) == 1:
        return first
    more = [f"also {error.where}: {error.problem}" for error in errors[1:]]
    steps = [first.next_step] if first.next_step else []
    return ConfigError(
        first.problem,
        where=first.where,
        expected=first.expected,
        found=first.found,
        next_step="\n  ".join([*steps, *more]),
    )


def _document_path(value: Any, detail: ErrorDetails) -> Path:
    """pydantic's location without the names of union branches."""
    path: Path = ()
    last = detail["loc"][-1] if detail["loc"] else None
    for part in detail["loc"]:
        if isinstance(value, list) and isinstance(part, int):
            value = cast("list[Any]", value)[part]
        elif isinstance(value, dict) and part in value:
            value = cast("dict[Any, Any]", value)[part]
        elif detail["type"] != "missing" or part != last:
            continue
        path = (*path, part)
    return path


def _one(document: Document, path: Path, details: list[ErrorDetails]) -> ConfigError:
    detail = details[0]
    key = ".".join(str(part) for part in path) or "the file"
    place = document.place(path)
    if detail["type"] == "extra_forbidden":
        return _unknown_key(place, str(path[-1]), path, document)
    if detail["type"] == "missing":
        return ConfigError(
            f"`{key}` is missing", where=place, next_step=f"add `{path[-1]}:` to this section"
        )
    ours = [one for one in details if one["type"] == "value_error"]
    if ours:
        return ConfigError(f"`{key}`: {ours[0]['msg'].removeprefix('Value error, ')}", where=place)
    return ConfigError(
        f"`{key}` is not right",
        where=place,
        expected=" or ".join(dict.fromkeys(_expected(one) for one in details)),
        found=repr(detail["input"])[:120],
    )


_EXPECTED = {
    "dict_type": "a mapping",
    "greater_than_equal": "an integer of at least {ge}",
    "int_type": "an integer",
    "list_type": "a list",
    "model_type": "a mapping",
    "string_too_short": "text that is not empty",
    "string_type": "text",
    "too_long": "a {field_type} of length {max_length} or less",
    "too_short": "a {field_type} of length {min_length} or more",
}


def _expected(detail: ErrorDetails) -> str:
    text = _EXPECTED.get(detail["type"])
    if text is None:
        return detail["msg"].removeprefix("Input should be ")
    return text.format(**detail.get("ctx", {})).lower()


def _unknown_key(place: str, key: str, path: Path, document: Document) -> ConfigError:
    if key in schema.PLANNED:
        return ConfigError(f"`{key}`: {schema.PLANNED[key]}", where=place)
    known = _known_keys(path, document)
    close = difflib.get_close_matches(key, known, n=1)
    return ConfigError(
        f"unknown key `{key}`",
        where=place,
        expected="one of " + ", ".join(known),
        next_step=f"did you mean `{close[0]}`?" if close else "remove it, or check its spelling",
    )


_SECTIONS: dict[str, type[BaseModel]] = {
    "target": schema.TargetSection,
    "mesh": schema.MeshSection,
    "lora": schema.LoraSection,
    "tokens": schema.TokensSection,
    "buckets": schema.StepBuckets,
    "programs": schema.ProgramEntry,
    "limits": schema.LimitsSection,
    "store": schema.StoreSection,
    "adapters": schema.AdaptersSection,
    "decoder": schema.DecoderSection,
    "rope_scaling": schema.RopeScalingSection,
    "kv_cache": schema.KvCacheSection,
}


def _known_keys(path: Path, document: Document) -> list[str]:
    names = [part for part in path[:-1] if isinstance(part, str)]
    section = _SECTIONS[names[-1]] if names else schema.ConfigFile
    known = set(section.model_fields)
    if section is schema.StepBuckets:  # the one section that is one of two models
        fitted = schema.bucket_kind(document.value["tokens"]["buckets"]) == "<fit>"
        known = set(schema.FitBuckets.model_fields) | (set() if fitted else known)
    return sorted(known)
