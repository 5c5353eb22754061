"""Text for Python values that reads the same in another process, or a reason why there is none.

A static argument, and what a function holds (closure, bound arguments, its object), decide what is
traced. A sealed process does not trace, so it has to tell them apart by such a text alone.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
from collections.abc import Iterable
from typing import Any, cast

import jax
import numpy as np

from aot_lora._jax_compat.placement import sharding_text
from aot_lora.errors import ProgramError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), np.number, np.bool_)


class Stable:
    """Makes texts and collects the modules whose sources give them their meaning."""

    def __init__(self) -> None:
        self.modules: set[str] = set()
        self._open: list[int] = []

    def text(self, value: Any, place: str) -> str:
        """The text of a value.

        Args:
          value: anything.
          place: what it is, for the error.

        Raises:
          ProgramError: its identity would not survive this process.
        """
        if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
            return f"{value!r}" if type(value) in _PLAIN else f"{type(value).__name__}({value!r})"
        if isinstance(value, enum.Enum):
            return f"{self.text(type(value), place)}.{value.name}"
        if isinstance(value, np.dtype):
            return f"dtype({value.name})"
        if isinstance(value, type):
            return self._name(value)
        if id(value) in self._open:
            return "itself"
        self._open.append(id(value))
        try:
            return self._compound(value, place)
        finally:
            self._open.pop()

    def _compound(self, value: Any, place: str) -> str:
        match value:
            case tuple() | list():
                items = self._all(cast("Iterable[Any]", value), place)
                return f"{self._name(type(value))}({', '.join(items)})"
            case frozenset() | set():
                return f"set({', '.join(sorted(self._all(cast('Iterable[Any]', value), place)))})"
            case dict():
                return f"dict({', '.join(self._all(cast('dict[Any, Any]', value).items(), place))})"
            case functools.partial():
                bound = (value.func, value.args, value.keywords)
                return f"partial({', '.join(self._all(bound, place))})"
            case types.ModuleType():
                self.modules.add(value.__name__)
                return f"module {value.__name__}"
            case types.MethodType():
                return f"{self.text(value.__func__, place)} of {self.text(value.__self__, place)}"
            case types.FunctionType():
                return self._function(value, place)
            case types.BuiltinFunctionType() | np.ufunc():
                return f"{getattr(value, '__module__', None) or 'builtins'}.{value.__name__}"
            case jax.sharding.Sharding() | jax.sharding.PartitionSpec():
                return sharding_text(value)
            case jax.sharding.Mesh():
                spec = jax.sharding.NamedSharding(value, jax.sharding.PartitionSpec())
                return f"mesh {sharding_text(spec)}"
            case jax.Device():
                return f"device {value.id}"
            case _:
                return self._other(value, place)

    def _other(self, value: Any, place: str) -> str:
        kind = cast("Any", type(value))
        if _is_frozen(kind):
            fields = [
                f"{field.name}={self.text(getattr(value, field.name), f'{place}.{field.name}')}"
                for field in dataclasses.fields(kind)
            ]
            return f"{self._name(kind)}({', '.join(fields)})"
        wrapped = getattr(value, "__wrapped__", None)
        if callable(value) and wrapped is not None:
            return f"{self._name(kind)}({self.text(wrapped, place)})"
        # A jnp dtype such as jnp.float32, and ufuncs of JAX, are objects known by name.
        module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
        if callable(value) and isinstance(module, str) and isinstance(name, str):
            self.modules.add(module)
            return f"{module}.{name}"
        raise ProgramError(
            f"{place} is of a kind that cannot be told apart in another process",
            expected="numbers, texts, enums, dtypes, functions, and tuples or frozen dataclasses"
            " of such",
            found=f"{kind.__module__}.{kind.__qualname__}",
            next_step="pass arrays as arguments and settings as such values; for what a function"
            " holds, aot_lora.jit(..., key=TEXT) may stand for it",
        )

    def _function(self, function: types.FunctionType, place: str) -> str:
        self.modules.add(function.__module__)
        name = f"{function.__module__}.{function.__qualname__}"
        if "<" in function.__qualname__:  # A name that several may share.
            name += f":{function.__code__.co_firstlineno}"
        held = self.held(function, place)
        return f"{name}({held})" if held else name

    def held(self, function: types.FunctionType, place: str) -> str:
        """The text of what a function holds besides its code: defaults and closure."""
        texts: list[str] = []
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            texts.append(self.text(value, f"a default of {place}"))
        names = function.__code__.co_freevars
        for name, cell in zip(names, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # Not bound yet.
                continue
            texts.append(f"{name}={self.text(value, f'`{name}`, which {place} holds,')}")
        return ", ".join(texts)

    def _all(self, values: Iterable[Any], place: str) -> list[str]:
        return [self.text(value, place) for value in values]

    def _name(self, kind: type) -> str:
        self.modules.add(kind.__module__)
        return (
            kind.__qualname__
            if kind.__module__ == "builtins"
            else f"{kind.__module__}.{kind.__qualname__}"
        )


def _is_frozen(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind) and cast("Any", kind).__dataclass_params__.frozen
