"""What tells one call of a jitted function from another, as a text that outlives the process."""

from __future__ import annotations

import functools
import hashlib
import json
import types
from collections.abc import Collection, Mapping
from typing import Any

from aot_lora._jax_compat.calls import Call
from aot_lora._jax_compat.described import Text
from aot_lora._jax_compat.dispatch import Given, options_of, recorded_arguments
from aot_lora._jax_compat.placement import context_texts
from aot_lora._jax_compat.trees import tree_of
from aot_lora.errors import ProgramError
from aot_lora.runtime.jit.jitted import Jitted
from aot_lora.runtime.jit.stable import Stable
from aot_lora.signature import Signature

FORMAT = 1  # of the texts: part of a recording's identity


class Function:
    """A jitted function as recordings see it.

    Args:
      jitted: the function.

    Raises:
      ProgramError: it holds something that has no lasting text, and no key stands for it.
    """

    def __init__(self, jitted: Jitted) -> None:
        self.jitted = jitted
        stable = Stable()
        self._fixed: dict[str, Any] = {
            "program": jitted.program,
            "function": jitted.qualified_name,
            "key": jitted.key,
            "held": "" if jitted.key else _held(stable, jitted),
            "options": options_of(jitted.plain),
        }
        root: Any = jitted.function
        while isinstance(root, functools.partial):
            root = root.func
        module = str(getattr(root, "__module__", ""))
        self.modules = {module, *stable.modules, *jitted.sources}

    def text(self, given: Given) -> str:
        """The text of a call, as JSON; calls of one text run the same executable.

        Raises:
          ProgramError: an argument cannot be told apart in another process.
        """
        stable = Stable()
        where = f"`{self.jitted.program}`"
        table: dict[str, int] = {"": 0}
        leaves = [
            [list(shape), dtype, weak, table.setdefault(sharding, len(table))]
            for shape, dtype, weak, sharding in given.specs()
        ]
        static = {
            name: stable.text(value, f"static argument `{name}` of {where}")
            for name, value in given.static.items()
        }
        self.modules |= stable.modules
        try:
            tree = given.tree_text()
        except ProgramError as error:
            raise ProgramError(error.problem, **{**error.fields(), "where": where}) from None
        call = {
            **self._fixed,
            "static": static,
            "tree": tree,
            "leaves": leaves,
            "shardings": list(table),
            "context": dict(context_texts()),
        }
        return json.dumps(call, sort_keys=True)


def _held(stable: Stable, jitted: Jitted) -> str:
    function, place = jitted.function, f"`{jitted.program}`"
    if isinstance(function, types.FunctionType):
        inner = getattr(function, "__wrapped__", None)
        held = stable.held(function, place)
        return held if inner is None else f"{held} of {stable.text(inner, place)}"
    return stable.text(function, f"what {place} holds")


def variant_name(text: str, taken: Collection[str]) -> str:
    """The name of a recorded call: its program, and a hash.

    JAX's options count only where the name is taken without them: releases have different ones,
    and a lock should hold for several.
    """
    call = json.loads(text)
    for left_out in ("context", ""):
        rest = {part: value for part, value in call.items() if part != left_out}
        digest = hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()
        name = f"{call['program']}/{digest[:12]}"
        if name not in taken:
            break
    return name


def readable(signature: Signature) -> str:
    """A recorded call in one line, for a lock: static values, arguments and results."""
    static: Mapping[str, str] = json.loads(signature.call)["static"]
    return ", ".join([*(f"{name}={value}" for name, value in static.items()), str(signature)])


def recorded_call(signature: Signature) -> Call:
    """A recorded call, to compare others with."""
    call = json.loads(signature.call)
    shardings = [call["shardings"][leaf[3]] for leaf in call["leaves"]]
    arguments = recorded_arguments(signature, shardings)
    return _described(call, arguments, signature.function)


def made_call(text: str, given: Given, function: str) -> Call:
    """A call that is made now, in the same terms."""
    return _described(json.loads(text), given.arguments(), function)


def _described(call: Mapping[str, Any], arguments: Any, function: str) -> Call:
    return Call(
        function=function,
        arguments=arguments,
        tree=tree_of(call["tree"]),
        static={name: Text(value) for name, value in call["static"].items()},
        options={**call["options"], "key": call["key"], "what it holds": call["held"]},
        context={name: Text(value) for name, value in call["context"].items()},
    )
