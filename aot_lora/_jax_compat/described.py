"""A call as plain JSON and back, for a reader in another process: text for what JAX holds."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

from jax._src import config as jax_config
from jax._src.sharding_impls import UnspecifiedValue
from jax.sharding import Mesh, Sharding

from aot_lora._jax_compat.calls import Argument, Call, _sharding_text
from aot_lora._jax_compat.stack import portable
from aot_lora._jax_compat.trees import tree_text
from aot_lora.errors import ProgramError
from aot_lora.signature import ArraySpec

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_MOST_CHARS = 160
# `inline` says nothing of a call on its own; the axes in scope are none there.
_LEFT_OUT = ("inline", "axis_env_state")


class Text(str):
    """The text of a static value or option: shown as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def context_now() -> dict[str, str]:
    """JAX's options and context managers that a trace depends on, as text."""
    names, values = jax_config.trace_context_names(), jax_config.trace_context()
    return _texts(dict(zip(names, values, strict=False)))


def call_fields(call: Call, context: Mapping[str, str]) -> dict[str, Any]:
    """A call as JSON. What is empty or JAX's default is left out.

    Args:
      call: any.
      context: of `context_now`, what is to be taken for the default.
    """
    fields: dict[str, Any] = {
        "function": call.function,
        "place": portable(call.place),
        "arguments": [_argument_fields(argument) for argument in call.arguments],
        "results": list(call.results or ()),
        "static": _texts(call.static or {}),
        "options": _texts(call.options or {}),
        "context": {
            name: text
            for name, text in _texts(call.context or {}).items()
            if text != context.get(name)
        },
        "tree": hashlib.sha256("".join(tree_texts(call)).encode()).hexdigest()[:12],
    }
    return {name: value for name, value in fields.items() if value}


def call_from(fields: Mapping[str, Any]) -> Call:
    """The call that `call_fields` wrote, to compare with others of that kind."""
    return Call(
        function=fields["function"],
        place=fields.get("place", ""),
        arguments=tuple(_argument(argument) for argument in fields.get("arguments", ())),
        results=tuple(fields.get("results", ())),
        static=_quoted(fields, "static"),
        options=_quoted(fields, "options"),
        context=_quoted(fields, "context"),
    )


def tree_texts(call: Call) -> tuple[str, str]:
    """The pytrees of arguments and results, as in a `Signature`; "" where unknown."""
    texts: list[str] = []
    for tree in (call.tree, call.out_tree):
        try:
            texts.append("" if tree is None else tree_text(tree, own_nodes=True))
        except ProgramError:  # It only has to read the same next time.
            texts.append(_text(tree))
    return texts[0], texts[1]


def _argument_fields(argument: Argument) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": argument.spec.name, "type": str(argument.spec)}
    if argument.kind:
        fields["kind"] = argument.kind
    if argument.donated:
        fields["donated"] = True
    if argument.committed:
        fields["sharding"] = argument.sharding
    return fields


def _argument(fields: Mapping[str, Any]) -> Argument:
    sharding = fields.get("sharding", "")
    return Argument(
        spec=ArraySpec.parse(fields["type"], name=fields["name"]),
        kind=fields.get("kind", ""),
        committed=bool(sharding),
        sharding=sharding,
        donated=fields.get("donated", False),
    )


def _quoted(fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    return {key: Text(text) for key, text in fields.get(name, {}).items()}


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: _text(value)
        for name, value in values.items()
        if name not in _LEFT_OUT and not _is_default(value)
    }


def _is_default(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_default, cast("tuple[Any, ...]", value)))
    empty = isinstance(value, Mesh) and value.empty
    return empty or value is None or value is False or isinstance(value, UnspecifiedValue)


def _text(value: Any) -> str:
    text = _ADDRESS.sub("", _plain(value))
    if len(text) > _MOST_CHARS:  # The end may be what differs.
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        text = f"{text[: _MOST_CHARS - 20]}... ({digest})"
    return text


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(map(_plain, cast('Sequence[Any]', value)))})"
    if isinstance(value, frozenset):  # Its order is another in each process.
        return f"{{{', '.join(sorted(map(_plain, cast('frozenset[Any]', value))))}}}"
    if isinstance(value, UnspecifiedValue):
        return "unspecified"
    try:
        if isinstance(value, Sharding):
            return _sharding_text(value, list(value._device_assignment))
        return repr(value)
    except Exception as error:  # A user's own `repr`.
        return f"a {type(value).__qualname__} ({type(error).__name__})"
