"""Pytrees as text that another process can read back, nodes of the user's own included."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import base64
import json
import sys
from functools import cache
from typing import Any

from jax._src import tree_util

from aot_lora.errors import ProgramError

_MARK = "json:"


def tree_text(tree: Any, *, own_nodes: bool) -> str:
    """The text of a pytree: JAX's protocol buffer in base64, or JSON where that has no name for it.

    Args:
      tree: the pytree's definition.
      own_nodes: whether named tuples and classes registered with JAX may be nodes. A process that
        reads such a text must have imported them.

    Raises:
      ProgramError: other nodes than tuples, lists, dicts and None; with `own_nodes`, one of a class
        that cannot be found by name, or whose static data are no numbers, texts, or tuples of such.
    """
    try:
        return base64.b64encode(tree.serialize_using_proto()).decode()
    except ValueError:
        if own_nodes:
            return _MARK + json.dumps(_encoded(tree))
    raise ProgramError(
        "an argument or result holds a pytree node of its own kind",
        expected="tuples, lists, dicts and None around the arrays",
        found=str(tree)[:200],
        next_step="flatten it into a dict or tuple at the program's edge",
    )


@cache  # the variants of a program share theirs
def tree_of(text: str) -> Any:
    """The pytree that `tree_text` wrote."""
    if text.startswith(_MARK):
        return _decoded(json.loads(text.removeprefix(_MARK)))
    registry = tree_util.default_registry
    return tree_util.PyTreeDef.deserialize_using_proto(registry, base64.b64decode(text))


def _encoded(tree: Any) -> Any:
    node = tree.node_data()
    if node is None:
        return "*"
    kind, data = node
    if kind is type(None):
        return None
    name = f"{kind.__module__}:{kind.__qualname__}"
    if _find(name) is not kind:
        raise _unknown(kind, "its class cannot be found by module and name")
    return [name, _plain(data, kind), [_encoded(child) for child in tree.children()]]


def _decoded(value: Any) -> Any:
    if value == "*":
        return tree_util.tree_structure(0)
    if value is None:
        return tree_util.tree_structure(None)
    name, data, children = value
    kind = _find(name)
    if not isinstance(kind, type):
        raise ProgramError(
            f"a recorded call takes or returns a `{name}`, which is not there",
            next_step=f"import `{name.partition(':')[0]}` before the recording is opened",
        )
    return tree_util.PyTreeDef.from_node_data_and_children(
        tree_util.default_registry, (kind, _unplain(data)), [_decoded(child) for child in children]
    )


def _plain(data: Any, kind: type) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if isinstance(data, tuple | list):
        return [type(data).__name__, [_plain(item, kind) for item in data]]
    if isinstance(data, type):
        return ["type", [f"{data.__module__}:{data.__qualname__}"]]
    raise _unknown(kind, f"its static data hold a {type(data).__qualname__}")


def _unplain(data: Any) -> Any:
    if not isinstance(data, list):
        return data
    kind, items = data
    if kind == "type":
        return _find(items[0])
    return (list if kind == "list" else tuple)(map(_unplain, items))


def _find(name: str) -> Any:
    # Not imported: a stored text must not run anything.
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def _unknown(kind: type, why: str) -> ProgramError:
    return ProgramError(
        "an argument or result holds a pytree node that cannot be written down",
        expected="tuples, lists, dicts, None, named tuples, and registered classes whose static"
        " data are numbers, texts, or tuples of such",
        found=f"{kind.__module__}.{kind.__qualname__}: {why}",
        next_step="flatten it into a dict or tuple at the program's edge",
    )
