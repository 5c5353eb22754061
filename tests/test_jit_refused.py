"""What cannot be recorded is refused by name; texts of values are the same in every process."""

import enum
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aot_lora
from aot_lora.errors import ProgramError
from aot_lora.runtime.jit.stable import Stable

X = np.ones(3, np.float32)


class Color(enum.Enum):
    RED = 1


@dataclass(frozen=True)
class Settings:
    heads: int
    dtype: Any


@dataclass
class Mutable:
    heads: int

    def __hash__(self) -> int:
        return 0


class Model:
    def __init__(self, by: float) -> None:
        self.by = by

    def run(self, x: Any) -> Any:
        return x * self.by


def first(x: Any, value: Any) -> Any:
    del value
    return x


def holding(value: Any) -> Callable[[Any], Any]:
    def held(x: Any) -> Any:
        return x if value is None else -x

    return held


def deleted(x: Any) -> Any:
    jax.debug.print("{}", x)
    return x


ARRAY = jax.device_put(np.arange(3.0, dtype=np.float32))


@pytest.mark.parametrize(
    ("jitted", "args", "says"),
    [
        (aot_lora.jit(first, static_argnums=1), (X, Mutable(1)), "static argument `value`"),
        (aot_lora.jit(first, static_argnums=1), (X, object()), "static argument `value`"),
        (aot_lora.jit(Model(2.0).run), (X,), "test_jit_refused.Model"),
        (aot_lora.jit(holding(Model(2.0))), (X,), "`value`, which `"),
        (aot_lora.jit(holding(X)), (X,), "numpy.ndarray"),
        (aot_lora.jit(lambda x: x + ARRAY), (X,), "closes over arrays"),
        (aot_lora.jit(lambda x: jax.jit(lambda y: y + ARRAY)(x)), (X,), "closes over arrays"),
        (aot_lora.jit(deleted), (X,), "calls back into Python"),
        (aot_lora.jit(lambda x: x), (jax.random.key(0),), "wrap_key_data"),
        (aot_lora.jit(lambda x: x.nothing), (X,), "cannot be traced: AttributeError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_recorded_is_refused(
    jitted: Any, args: tuple[Any, ...], says: str, tmp_path: Path
) -> None:
    with aot_lora.recording("refused", tmp_path), pytest.raises(ProgramError) as caught:
        jitted(*args)
    assert says in str(caught.value)
    assert "next:" in str(caught.value)


def test_a_key_stands_for_what_a_function_holds(tmp_path: Path) -> None:
    def make(by: float) -> Any:
        return aot_lora.jit(Model(by).run, program="model", key=f"by {by}")

    with aot_lora.recording("key", tmp_path):
        make(2.0)(X)
        make(3.0)(X)
    with aot_lora.replay("key", tmp_path):
        np.testing.assert_array_equal(make(3.0)(X), X * 3)
        np.testing.assert_array_equal(make(2.0)(X), X * 2)
        with pytest.raises(aot_lora.errors.RecompileError, match=r"key: 'by 4\.0', was 'by "):
            make(4.0)(X)


VALUES: dict[str, Any] = {
    "none": None,
    "bool": True,
    "int": 1,
    "float": 1.0,
    "text": "1",
    "bytes": b"1",
    "tuple": (1, (2, "x")),
    "list": [1, (2, "x")],
    "set": frozenset({"one", "two", "three"}),
    "enum": Color.RED,
    "dtype": np.dtype("int8"),
    "jax dtype": jnp.bfloat16,
    "scalar": np.float32(1),
    "dataclass": Settings(8, jnp.float32),
    "another": Settings(9, jnp.float32),
    "function": first,
    "ufunc": jnp.add,
    "jax function": jax.nn.silu,
    "closure": holding(1),
    "closure over another": holding(2),
    "partial": functools.partial(first, value=1),
    "partial of another": functools.partial(first, value=2),
    "lambda": lambda x: x,
    "spec": jax.sharding.PartitionSpec("a", None),
    "module": os,
    "dict": {"a": 1},
}


def test_texts_differ_where_values_do() -> None:
    texts = {name: Stable().text(value, "it") for name, value in VALUES.items()}
    assert len(set(texts.values())) == len(VALUES), texts
    assert not [text for text in texts.values() if " at 0x" in text or "<function" in text]


def test_texts_are_the_same_in_another_process() -> None:
    code = (
        "from test_jit_refused import Stable, VALUES;"
        "print({name: Stable().text(value, name) for name, value in VALUES.items()})"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
