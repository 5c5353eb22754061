"""What is written of a compile: the project's fingerprint, its key, what tells it from others."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from aot_lora._jax_compat.described import call_from
from aot_lora.capture import lock as locks
from aot_lora.capture.reasons import AGAIN, reason
from aot_lora.capture.records import Recorded, Records, key, read_records
from aot_lora.capture.summary import by_function
from aot_lora.capture.watch import watch
from aot_lora.errors import StoreError
from aot_lora.lowering.trace import lower
from aot_lora.signature import ArraySpec

X = np.ones((4, 8), np.float32)
MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


class Pair(NamedTuple):
    one: Any
    two: Any


def scaled(x: Any, n: int = 2, *, by: Any = None) -> Any:
    y = x.one + x.two if isinstance(x, tuple) else x
    return {"y": y * n if by is None else y * by["q"]}


def compiled(work: Callable[[], Any]) -> dict[str, Any]:
    """The fields of the last compile."""
    with watch() as seen:
        work()
    return seen[-1].fields


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
@pytest.mark.parametrize(
    ("options", "args", "kwargs"),
    [
        ({}, (X,), {}),
        ({"static_argnames": "n"}, (X, 3), {}),
        ({"static_argnames": "n", "donate_argnums": 0}, (X,), {"n": 4}),
        ({"static_argnames": "n"}, (X,), {"by": {"q": 2.0}}),
        ({"static_argnames": "n"}, (Pair(X, X),), {}),
        (
            {"out_shardings": NamedSharding(MESH, PartitionSpec("d"))},
            (jax.device_put(X, NamedSharding(MESH, PartitionSpec("d"))),),
            {},
        ),
    ],
    ids=["plain", "static", "donated", "by keyword", "named tuple", "on a mesh"],
)
def test_a_program_has_the_fingerprint_that_a_lock_of_a_config_has(
    options: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    def jitted() -> Any:
        # Anew each time: what is compiled already would not come by.
        function = functools.wraps(scaled)(lambda *a, **k: scaled(*a, **k))
        return jax.jit(function, **options)

    known = lower(
        lambda: jitted().trace(*args, **kwargs), platform="cpu", where="here", own_nodes=True
    )
    called = compiled(lambda: jitted()(*args, **kwargs))
    ahead = compiled(lambda: jitted().lower(*args, **kwargs).compile())

    assert called["fingerprint"] == ahead["fingerprint"] == known.fingerprint
    assert key(called) == key(ahead)


def on(spec: Any) -> Any:
    return jax.device_put(X, NamedSharding(MESH, PartitionSpec(spec)))


def other() -> Any:
    """Of the same name."""

    def scaled(x: Any, n: int = 2, *, by: Any = None) -> Any:
        return {"y": x * n - 1}

    return scaled


F = jax.jit(scaled, static_argnames="n")
DIFFERENT: dict[str, tuple[Callable[[], Any], str]] = {
    "shape": (lambda: F(X[:3]), "x: f32[3,8], shape was [4,8]"),
    "dtype": (lambda: F(X.astype(np.int32)), "x: i32[4,8], dtype was f32"),
    "scalar": (lambda: F(2.0), "x: a Python float, was an f32[4,8] array"),
    "static": (lambda: F(X, n=7), "n: static value 7, was 2"),
    "sharding": (lambda: F(on("d")), "x: committed to P('d') over 2 devices, was uncommitted"),
    "tree": (lambda: F(X, by={"q": X}), "by['q']: f32[4,8], was not there"),
    "donation": (
        lambda: jax.jit(scaled, static_argnames="n", donate_argnums=0)(X),
        "x: donated, was not",
    ),
    "option": (
        lambda: jax.jit(
            scaled, static_argnames="n", compiler_options={"xla_cpu_enable_fast_math": True}
        )(X),
        "xla_cpu_enable_fast_math: True, was None",
    ),
    "code": (
        lambda: jax.jit(other(), static_argnames="n")(X),
        "other code",
    ),
}


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
@pytest.mark.parametrize("name", DIFFERENT)
def test_each_difference_is_named_also_by_a_lock_read_back(name: str) -> None:
    jax.clear_caches()
    work, text = DIFFERENT[name]
    first, second = compiled(lambda: F(X)), compiled(work)
    line = locks.lock_of(records(first)).compiles[0]
    read_back = locks.Locked.model_validate(json.loads(json.dumps(line.fields)))

    for known in (first, read_back.fields):
        near = reason(second, [known])
        assert near is not None
        assert text in near.text
        assert key(known) != key(second)
        same = reason(first, [known])  # Control.
        assert same is not None
        assert same.text == AGAIN


def test_a_context_is_named() -> None:
    first = compiled(lambda: jax.jit(lambda x: x @ x.T)(X))
    with watch() as seen, jax.default_matmul_precision("highest"):
        jax.jit(lambda x: x @ x.T)(X)
    near = reason(seen[-1].fields, [first])
    assert near is not None
    assert near.text == "jax_default_matmul_precision: 'highest', was None"


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", "int64", "uint8"),
        *("uint2", "bool", "complex64", "key<fry>", "float0"),
    ],
)
@pytest.mark.parametrize("shape", [(), (3,), (0, 12, 1)])
def test_an_array_is_what_its_text_says(dtype: str, shape: tuple[int, ...]) -> None:
    for weak in (False, True):
        spec = ArraySpec(shape=shape, dtype=dtype, weak_type=weak, name="x['a: b[0]']")
        assert ArraySpec.parse(str(spec), name=spec.name) == spec


def test_what_has_no_lasting_text_gets_one_or_none() -> None:
    class Odd:
        def __repr__(self) -> str:
            raise ZeroDivisionError

    def run(value: Any) -> Any:
        f = jax.jit(lambda x, static: x * 5, static_argnames="static")
        return compiled(lambda: f(X, static=value))["static"]["static"]

    assert (
        run(Odd())
        == "a test_what_has_no_lasting_text_gets_one_or_none.<locals>.Odd (ZeroDivisionError)"
    )
    assert run(object()) == "<object object>"
    assert run(frozenset("cab")) == "{'a', 'b', 'c'}"
    long = [run("x" * 300 + end) for end in "ab"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 170


def recorded(fields: dict[str, Any], process: str = "1", outcome: str = "compiled") -> Recorded:
    return Recorded(fields=fields, outcome=outcome, seconds=0.5, process=process)


def records(*compiles: Recorded | dict[str, Any]) -> Records:
    made = tuple(one if isinstance(one, Recorded) else recorded(one) for one in compiles)
    return Records(compiles=made, pythons=1, jax=("0",), troubles=())


def fields(fingerprint: str, **more: Any) -> dict[str, Any]:
    own = {"function": "f", "fingerprint": fingerprint, "platform": "cpu"}
    return {**own, "frames": ["a.py:1 f"], "at": "a.py:1 f", **more}


def test_a_lock_counts_by_process_and_says_what_comes_more_often() -> None:
    a, b = fields("a"), fields("b")
    run = records(recorded(a), recorded(b), recorded(a), recorded(a, "2"))
    lock = locks.lock_of(run)
    assert [(line.fingerprint, line.count) for line in lock.compiles] == [("a", 2), ("b", 1)]
    assert locks.unheld(lock, run) == ()

    more = records(
        *(recorded(a, process) for process in "122333"), recorded(b, outcome="cache hit")
    )
    (found,) = locks.unheld(lock, more)
    assert (found.count, found.allowed, found.first.process) == (3, 2, "3")


def test_the_order_of_a_run_does_not_move_its_lock(tmp_path: Path) -> None:
    """Nor what else is known of two compiles of one program."""
    a, again, b = fields("a", static={"n": "1"}), fields("a", static={"n": "0"}), fields("b")
    texts = {
        locks.dump(locks.lock_of(records(*order)))
        for order in ((a, again, b), (b, again, a), (again, a, b))
    }
    assert len(texts) == 1
    locks.write(locks.lock_of(records(a, again, b)), tmp_path / "x.lock")
    assert locks.dump(locks.read(tmp_path / "x.lock")) in texts
    assert locks.read(tmp_path / "x.lock").counts() == {key(a): 2, key(b): 1}
    with pytest.raises(StoreError, match="the lock cannot be written: Is a directory"):
        locks.write(locks.lock_of(records(a)), tmp_path)


def test_an_empty_lock_is_one_of_a_program_that_compiles_nothing(tmp_path: Path) -> None:
    locks.write(locks.lock_of(records()), tmp_path / "x.lock")
    lock = locks.read(tmp_path / "x.lock")

    assert locks.unheld(lock, records()) == ()
    assert len(locks.unheld(lock, records(fields("a")))) == 1


def test_records_that_were_cut_short_are_read_up_to_there(tmp_path: Path) -> None:
    begin = json.dumps({"event": "begin", "number": 0, **fields("a")})
    (tmp_path / "12.jsonl").write_text(
        '{"event": "jax", "version": "1"}\n' + begin + '\n{"event": '
    )
    found = read_records(tmp_path)

    assert [(one.fields["fingerprint"], one.outcome) for one in found.compiles] == [
        ("a", "unfinished")
    ]
    assert found.jax == ("1",)


def test_a_function_compiled_in_two_processes_is_not_compiled_again() -> None:
    (alone,) = by_function([recorded(fields("a")), recorded(fields("a"), "2")])
    assert (alone.compiles, alone.seconds, alone.repeats) == (2, 1.0, ())

    (twice,) = by_function([recorded(fields("a")), recorded(fields("a"))])
    assert [(one.nth, one.why, one.at) for one in twice.repeats] == [(2, AGAIN, "a.py:1 f")]


def test_a_call_read_back_is_compared_as_it_was() -> None:
    call = call_from(compiled(lambda: jax.jit(lambda x: jnp.sin(x))(on("d"))))
    assert call.arguments[0].sharding == "P('d') over 2 devices"
    assert str(call.arguments[0].spec) == "f32[4,8]"
