"""A refused compile names what differs from the nearest variant or earlier call."""

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from aot_lora import _jax_compat, forbid_compile
from aot_lora._jax_compat import calls, stack
from aot_lora.errors import RecompileError
from aot_lora.runtime import differences, guard
from aot_lora.signature import ArraySpec, Signature

X = np.ones((16, 64), np.float32)
HALF = np.float32(0.5)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


def fresh() -> Callable[..., Any]:
    """A function that JAX has not seen."""

    def step(x: Any, scale: Any, n: int = 3, *, p: Any = None) -> Any:
        return x * scale + n

    return step


def signature(function: Any, *args: Any, **kwargs: Any) -> Signature:
    traced = function.trace(*args, **kwargs)
    return _jax_compat.signature_of(traced, traced.lower())


def refused(work: Callable[[], Any], seal: str = "forbid_compile()", **known: Any) -> Any:
    guard.seal(seal, **known)
    try:
        with pytest.raises(RecompileError) as caught:
            work()
    finally:
        guard.unseal(seal)
    return caught.value


Args = tuple[tuple[Any, ...], dict[str, Any]]


def call(*args: Any, **kwargs: Any) -> Args:
    return args, kwargs


# What was compiled, what is called, and the difference: after an earlier call, from a variant.
CASES: dict[str, tuple[Args, Args, str, str | None]] = {
    "shape": (
        call(X, HALF),
        call(X[:15], HALF),
        "x: f32[15,64], shape was [16,64]",
        None,
    ),
    "rank": (call(X, HALF), call(X[0], HALF), "x: f32[64], shape was [16,64]", None),
    "dtype": (
        call(X, HALF),
        call(X.astype(ml_dtypes.bfloat16), HALF),
        "x: bf16[16,64], dtype was f32",
        None,
    ),
    "shape and dtype": (
        call(X, HALF),
        call(X[:8].astype(np.int32), HALF),
        "x: i32[8,64], shape was [16,64], dtype was f32",
        None,
    ),
    "weak type": (
        call(X[0], HALF),
        call(jax.ShapeDtypeStruct((64,), np.float32, weak_type=True), HALF),
        "x: ~f32[64], was not weakly typed",
        None,
    ),
    "no longer weak": (
        call(X, 0.5),
        call(X, HALF),
        "scale: f32[], was weakly typed, as a Python scalar is",
        None,
    ),
    "Python float": (
        call(X, HALF),
        call(X, 0.5),
        "scale: a Python float, was an f32[] array",
        None,
    ),
    "Python bool": (
        call(X, np.int32(1)),
        call(X, True),
        "scale: a Python bool, was an i32[] array",
        None,
    ),
    "Python int for a float": (
        call(X, 0.5),
        call(X, 1),
        "scale: a Python int, was weakly typed ~f32[], as a Python scalar is",
        None,
    ),
    "numpy float64 array": (
        call(X.astype(ml_dtypes.bfloat16), HALF),
        call(X.astype(np.float64), HALF),
        "x: a numpy float64 array, silently cast to f32[16,64], was a bf16[16,64] array",
        None,
    ),
    "numpy float64 scalar": (
        call(X, 0.5),
        call(X, np.float64(0.5)),
        "scale: a numpy float64 scalar, silently cast to f32[], "
        "was weakly typed ~f32[], as a Python scalar is",
        None,
    ),
    "static": (
        call(X, HALF, 3),
        call(X, HALF, 4),
        "n: static value 4, was 3",
        "n: static value 4, a variant has its own built in",
    ),
    "static by its default": (
        call(X, HALF),
        call(X, HALF, n=4),
        "n: static value 4, was 3",
        "n: static value 4, a variant has its own built in",
    ),
    "static of another type": (
        call(X, HALF, 3),
        call(X, HALF, 3.0),
        "n: static value 3.0, was 3",
        "n: static value 3.0, a variant has its own built in",
    ),
    "another key": (
        call(X, HALF, p={"a": X}),
        call(X, HALF, p={"b": X}),
        "p['b']: f32[16,64], was not there; p['a']: not there, was f32[16,64]",
        None,
    ),
    "one more leaf": (
        call(X, HALF, p=(X,)),
        call(X, HALF, p=(X, X)),
        "p[1]: f32[16,64], was not there",
        None,
    ),
    "another container": (
        call(X, HALF, p={"a": (X, X)}),
        call(X, HALF, p={"a": [X, X]}),
        "p['a']: list, was tuple",
        None,
    ),
    "None in place of an array": (
        call(X, HALF, p=(X, X)),
        call(X, HALF, p=(X, None)),
        "p[1]: not there, was f32[16,64]",
        None,
    ),
    "a positional container": (
        call(((X, HALF), X), HALF),
        call([(X, HALF), X], HALF),
        "x: list, was tuple",
        None,
    ),
    "keyword": (
        call(X, HALF),
        call(X, scale=HALF),
        "scale: passed by keyword, was by position",
        None,
    ),
    "position": (
        call(X, scale=HALF),
        call(X, HALF),
        "scale: passed by position, was by keyword",
        None,
    ),
    "several": (
        call(X, HALF, 3),
        call(X[:3], 0.5, 4),
        "n: static value 4, was 3; x: f32[3,64], shape was [16,64]; "
        "scale: a Python float, was an f32[] array",
        "n: static value 4, a variant has its own built in; "
        "x: f32[3,64], shape was [16,64]; scale: a Python float, was an f32[] array",
    ),
}


def weakly_typed(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arrays for the abstract ones among the arguments; made before the seal."""
    return tuple(
        jnp.full(arg.shape, 1.0) if isinstance(arg, jax.ShapeDtypeStruct) else arg for arg in args
    )


def jitted(case: str) -> Any:
    def first(x: Any, scale: Any) -> Any:
        return x[1] * scale

    plain = case == "a positional container"
    return jax.jit(first) if plain else jax.jit(fresh(), static_argnames="n")


@pytest.mark.parametrize("case", CASES)
def test_the_difference_from_an_earlier_call(case: str) -> None:
    before, after, text, _ = CASES[case]
    f = jitted(case)
    args = weakly_typed(after[0])
    f(*before[0], **before[1])

    error = refused(lambda: f(*args, **after[1]))

    assert error.found == text
    assert error.expected.startswith("as compiled before: x")
    f(*args, **after[1])  # Positive control: it was for the compiler, and unsealed it compiles.


@pytest.mark.parametrize("case", CASES)
def test_the_difference_from_a_variant(case: str) -> None:
    before, after, earlier, text = CASES[case]
    args = weakly_typed(after[0])
    known = {"step/t16": signature(jitted(case), *before[0], **before[1])}
    jax.clear_caches()

    error = refused(lambda: jitted(case)(*args, **after[1]), variants=known)

    found = error.found.removeprefix("n: static value 3, a variant has its own built in; ")
    assert found == (text or earlier)
    assert error.expected.startswith("as warmed: x")
    assert error.expected.endswith("(nearest variant `step/t16`)")


def test_a_cast_is_told_from_a_variant_even_where_the_types_agree() -> None:
    known = signature(jax.jit(fresh()), X, HALF, 3)

    found = calls.call_of(fresh(), X.astype(np.float64), HALF, 3)

    assert differences.differences(known, found) == (
        "x: a numpy float64 array, silently cast to f32[16,64], was an f32[16,64] array",
    )
    assert not differences.differences(known, calls.call_of(fresh(), X, HALF, 3))


def test_the_whole_text() -> None:
    f = jax.jit(fresh(), static_argnames="n")
    f(X, HALF)
    line = sys._getframe().f_lineno + 1
    error = refused(lambda: f(X[:15], 0.5))

    here = Path(__file__)
    place = str(here.relative_to(Path.cwd())) if here.is_relative_to(Path.cwd()) else str(here)
    defined = fresh().__code__.co_firstlineno
    assert str(error) == (
        f"forbid_compile(), called from {place}:{line}: refused to compile `step` "
        f"({place}:{defined})\n"
        "  expected: as compiled before: x: f32[16,64], scale: f32[], n=3\n"
        "  found: x: f32[15,64], shape was [16,64]; scale: a Python float, was an f32[] array\n"
        "  next: warm this shape up, or do the work in numpy before the device sees it"
    )


def test_what_to_do_next_depends_on_the_difference() -> None:
    f = jax.jit(fresh(), static_argnames="n")
    f(X, HALF)

    assert "np.float32(0.5), instead of" in refused(lambda: f(X, 0.5)).next_step
    assert "warm this value up" in refused(lambda: f(X, HALF, 9)).next_step
    every = set(
        re.findall(r'yield (?:\(\s*)?"([a-zA-Z ]+)",', Path(differences.__file__).read_text())
    )
    assert set(guard._NEXT_BY_KIND) - {"weak type"} <= every  # pyright: ignore[reportPrivateUsage]


def test_what_was_refused_or_only_lowered_is_no_earlier_call() -> None:
    f = jax.jit(fresh())
    f(X, HALF)
    f.lower(X[:7], HALF)
    for _ in range(2):
        assert refused(lambda: f(X[:7], HALF)).found == "x: f32[7,64], shape was [16,64]"
        assert refused(lambda: f(X[:8], HALF)).found == "x: f32[8,64], shape was [16,64]"


def test_the_nearest_of_several_earlier_calls() -> None:
    f = jax.jit(fresh())
    for rows in (1, 16, 4):
        f(X[:rows], HALF)
    f(X[:15].astype(np.int32), np.int32(1))

    assert refused(lambda: f(X[:15], HALF)).found == "x: f32[15,64], shape was [16,64]"
    assert refused(lambda: f(X[:5], HALF)).found == "x: f32[5,64], shape was [4,64]"


def test_the_nearest_variant_is_of_the_same_function_if_there_is_one() -> None:
    def other(x: Any, scale: Any, n: Any) -> Any:
        return x

    known = {f"step/t{t}": signature(jax.jit(fresh()), X[:t], HALF, 3) for t in (2, 4, 16)}
    near = {"other/t15": signature(jax.jit(other), X[:15], HALF, 3)}
    jax.clear_caches()
    work = lambda: jax.jit(fresh())(X[:15], HALF, np.int32(3))  # noqa: E731

    error = refused(work, variants=near | known)
    assert "(nearest variant `step/t16`)" in error.expected
    assert "(nearest variant `other/t15`, of `other`)" in refused(work, variants=near).expected


def test_equal_variants_go_by_order() -> None:
    one = signature(jax.jit(fresh()), X, HALF)
    jax.clear_caches()

    error = refused(lambda: jax.jit(fresh())(X[:3], HALF), variants={"b": one, "a": one})

    assert "`b`" in error.expected


def test_variants_go_with_their_seal() -> None:
    known = signature(jax.jit(fresh()), X, HALF)
    jax.clear_caches()
    work = lambda: jax.jit(fresh())(X[:3], HALF)  # noqa: E731

    with forbid_compile("inner"):
        sealed = refused(work, "store", variants={"step/t16": known})
        unsealed = refused(work)

    assert "(nearest variant `step/t16`)" in sealed.expected
    assert unsealed.found.endswith("nothing by this name was compiled before")


def test_a_variant_that_fits_is_to_be_looked_up() -> None:
    known = signature(jax.jit(fresh()), X, HALF)
    jax.clear_caches()

    error = refused(lambda: jax.jit(fresh())(X, HALF), variants={"step/t16": known})

    assert "not of the stored executable" in error.found
    assert error.next_step == "call what Runtime.lookup returns"


def test_nothing_comparable_is_said() -> None:
    error = refused(lambda: jax.jit(fresh())(X, HALF))
    assert error.expected == "only lookups of warmed executables"
    assert error.found == (
        "a compile for x: f32[16,64], scale: f32[]; nothing by this name was compiled before"
    )

    other = {"unlike": signature(jax.jit(lambda y: y), X)}
    error = refused(lambda: jax.jit(fresh())(X, HALF), variants=other)
    assert error.found.endswith("nothing by this name was warmed or compiled before")


def test_a_function_of_the_same_name_elsewhere_is_another() -> None:
    def step(x: Any, scale: Any) -> Any:
        return x

    jax.jit(step)(X, HALF)
    assert "nothing by this name" in refused(lambda: jax.jit(fresh())(X, HALF)).found


def test_a_function_defined_anew_is_recognised() -> None:
    first, again = jax.jit(fresh()), jax.jit(fresh())
    first(X, HALF)

    error = refused(lambda: again(X, HALF))

    assert error.found == "the function is a new object: defined, bound or wrapped again"
    assert "outside the loop" in error.next_step


def test_committing_an_argument_recompiles_and_is_named() -> None:
    f = jax.jit(fresh())
    f(X, HALF)
    device = jax.devices()[0]

    error = refused(lambda: f(jax.device_put(X, device), HALF))

    assert error.found == (
        f"x: committed to {device}, was uncommitted; traced before, only the executable is new"
    )
    assert "jax.device_put" in error.next_step


def test_donation_and_options_are_named() -> None:
    step = fresh()
    jax.jit(step)(X, HALF)

    donating = jax.jit(step, donate_argnums=0)
    assert refused(lambda: donating(X, HALF)).found.startswith("x: donated, was not")
    placing = jax.jit(step, out_shardings=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    assert refused(lambda: placing(X, HALF)).found.startswith("out_shardings: (SingleDevice")

    def precise() -> None:
        with jax.default_matmul_precision("highest"):
            jax.jit(step)(X, HALF)

    assert refused(precise).found == "jax_default_matmul_precision: 'highest', was None"


def test_methods_partials_vmap_and_nested_jit() -> None:
    class Model:
        def apply(self, x: Any) -> Any:
            return x + 1

    apply = jax.jit(Model().apply)
    part = jax.jit(functools.partial(fresh(), scale=HALF))
    inner = jax.jit(fresh())
    outer = jax.jit(lambda x: inner(x, HALF))
    rows = jax.jit(jax.vmap(fresh(), in_axes=(0, None)))
    over = lambda x: jax.vmap(lambda row: inner(row, HALF))(x)  # noqa: E731
    for f, name in (
        (apply, "apply"),
        (part, "step"),
        (outer, "<lambda>"),
        (rows, "step"),
        (over, "step"),
    ):
        f(X) if f is not rows else f(X, HALF)
        work = (lambda f=f: f(X[:5])) if f is not rows else (lambda: rows(X[:5], HALF))
        error = refused(work)
        assert error.found == "x: f32[5,64], shape was [16,64]", name
        assert f"refused to compile `{name}` (" in str(error)
        assert "test_guard_differences.py:" in error.problem


def test_lower_and_compile() -> None:
    f = jax.jit(fresh(), static_argnames="n")
    f(X, HALF)
    lowered = f.lower(X[:5], HALF, 4)

    error = refused(lowered.compile)
    assert error.found == "n: static value 4, was 3; x: f32[5,64], shape was [16,64]"
    assert "test_guard_differences.py" in error.where


def test_lowered_under_other_options_than_compiled_under() -> None:
    f = jax.jit(fresh())
    with jax.default_matmul_precision("highest"):
        lowered = f.lower(X, HALF)

    error = refused(lowered.compile)
    assert error.problem.startswith("refused to compile `step` (")
    assert error.found.startswith("a compile for x: f32[16,64], scale: f32[];")


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda x: jnp.pad(x, ((0, 61), (0, 0))), r"`_?pad`.*array: f32\[3,5\]"),
        (lambda x: x[1], r"for `ArrayImpl.__getitem__`.*f32\[3,5\]"),
        (lambda x: jnp.ones(977), r"` for `ones`"),
        (lambda x: x * 3, r"`multiply`.*f32\[3,5\].*a Python int"),
    ],
    ids=["pad", "index", "ones", "operator"],
)
def test_eager_operations_name_themselves_and_the_line(
    work: Callable[[Any], Any], text: str
) -> None:
    x = jax.device_put(np.ones((3, 5), np.float32))

    error = refused(lambda: work(x))

    assert re.search(text, str(error), re.DOTALL), str(error)
    assert re.search(r"called from .*test_guard_differences\.py:\d+", error.where)
    assert f":{work.__code__.co_firstlineno}" in error.where


def test_an_eager_operation_with_other_parameters_names_its_result() -> None:
    jnp.ones(4)
    found = refused(lambda: jnp.ones(977)).found
    assert found == "same arguments, but the result: f32[977], was f32[4]"


def test_a_refusal_in_another_thread_knows_the_earlier_calls() -> None:
    f = jax.jit(fresh())
    f(X, HALF)
    caught: list[RecompileError] = []

    def work() -> None:
        try:
            f(X[:5], HALF)
        except RecompileError as error:
            caught.append(error)

    with forbid_compile():
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert [error.found for error in caught] == ["x: f32[5,64], shape was [16,64]"] * 3
    assert all("test_guard_differences.py" in str(error.where) for error in caught)


def test_many_arguments_are_shortened_to_those_that_differ() -> None:
    params = {f"w{i}": X for i in range(50)}
    f = jax.jit(lambda p: p["w7"])
    f(params)

    error = refused(lambda: f({**params, "w7": X[:3]}))

    assert error.expected == "as compiled before: p['w7']: f32[16,64], and 49 more"
    assert error.found == "p['w7']: f32[3,64], shape was [16,64]"

    found = refused(lambda: f(dict.fromkeys(params, X[:3]))).found
    assert found.startswith("p['w0']: f32[3,64], shape was [16,64]; p['w1']: ")
    assert found.endswith("; and 42 more")


class Odd:
    """A static value whose `==` is no bool, as an array's is."""

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> Any:
        return self is other or np.ones(2)

    def __repr__(self) -> str:
        return "odd" * 100


def test_odd_static_values_do_not_hurt() -> None:
    before = calls.Call(function="step", arguments=(), static={"n": Odd()})
    after = calls.Call(function="step", arguments=(), static={"n": Odd(), "m": 1})

    first, second = differences.differences(before, after)

    assert first.startswith("n: static value oddodd")
    assert len(first) < 200
    assert second == "m: static value 1, was not given"


def test_a_stored_executable_is_for_the_first_device() -> None:
    spec = ArraySpec(shape=(4,), dtype="float32", name="x")
    known = signature(jax.jit(lambda x: x), X[0, :4])
    argument = calls.Argument(spec=spec, committed=True, sharding="cpu:1", elsewhere=True)
    call = calls.Call(function="f", arguments=(argument,))

    assert differences.differences(known, call) == (
        "x: committed to cpu:1, was for this host's first device",
    )


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (guard, "calls_at_hand"),
        (calls, "_call"),
        (differences, "nearest"),
        (differences, "compare"),
        (stack, "caller"),
    ],
)
def test_a_failure_while_explaining_leaves_the_plain_refusal(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = jax.jit(fresh())
    f(X, HALF)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("moved in this release")

    monkeypatch.setattr(owner, name, broken)

    def work() -> None:
        try:
            raise KeyError("the user's own")
        except KeyError:
            f(X[:5], HALF)

    error = refused(work)
    assert str(error) == (
        "forbid_compile(): refused to compile `jit_step`\n"
        "  expected: only lookups of warmed executables\n"
        "  found: a compile for arguments (f32[5,64], f32[])\n"
        "  next: warm this shape up, or do the work in numpy before the device sees it"
    )
    assert error.__cause__ is None
    assert isinstance(error.__context__, KeyError)


TWO_DEVICES = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from aot_lora import _jax_compat
from aot_lora.errors import RecompileError
from aot_lora.runtime import guard

def step(x, y):
    return x + y

def show(f, *args, **known):
    guard.seal("sealed", **known)
    try:
        f(*args)
    except RecompileError as error:
        print(error.found)
    finally:
        guard.unseal("sealed")

one, two = jax.devices()
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
x = np.ones((4, 2), np.float32)
rows = jax.device_put(x, NamedSharding(mesh, PartitionSpec("d")))
columns = jax.device_put(x, NamedSharding(mesh, PartitionSpec(None, "d")))
away = jax.device_put(x, two)
f = jax.jit(step)
f(x, x)
show(f, away, x)
f(rows, x)
show(f, columns, x)
f(rows, rows)
traced = jax.jit(step).trace(x, x)
known = {"step/t4": _jax_compat.signature_of(traced, traced.lower())}
jax.clear_caches()
show(f, away, x, variants=known)
show(f, rows, x, variants=known)
show(f, jax.device_put(x, one), x, variants=known)
"""


def test_shardings_and_commitment_on_two_devices() -> None:
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }
    done = subprocess.run(
        [sys.executable, "-c", TWO_DEVICES],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    reused = "; traced before, only the executable is new"
    assert done.stdout.replace("TFRT_CPU_", "cpu:").splitlines() == [
        f"x: committed to cpu:1, was uncommitted{reused}",
        f"x: sharding P(None, 'd') over 2 devices, was P('d') over 2 devices{reused}",
        "x: committed to cpu:1, was for this host's first device",
        "x: committed to P('d') over 2 devices, was for this host's first device",
        "the same arguments, but a call of JAX's own jit, not of the stored executable",
    ]
