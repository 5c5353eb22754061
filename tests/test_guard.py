"""The guard: a sealed process that asks for a compile gets an error before XLA starts."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot_lora import allow_compile, forbid_compile
from aot_lora._jax_compat import hooks
from aot_lora.errors import RecompileError
from aot_lora.runtime import guard
from aot_lora.signature import ArraySpec, Signature

X = jax.device_put(np.ones((3, 5), np.float32))


def fresh() -> Callable[[Any], Any]:
    """A function that JAX has not seen."""

    def half(x: Any) -> Any:
        return x * 0.5

    return half


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of what reaches the compiler."""
    seen: list[str] = []

    def spy(
        inner: Callable[..., Any], backend: Any, computation: Any, *rest: Any, **named: Any
    ) -> Any:
        seen.append(hooks.computation_text(computation)[0])
        return inner(backend, computation, *rest, **named)

    hooks.add_compile_hook(spy)
    yield seen
    hooks.remove_compile_hook(spy)


@pytest.mark.parametrize(
    ("work", "name", "arguments"),
    [
        (lambda: jax.jit(fresh())(X), "half", "x: f32[3,5]"),
        (lambda: jax.jit(fresh()).lower(X).compile(), "half", "x: f32[3,5]"),
        (lambda: jax.jit(jax.vmap(fresh()))(X), "half", "x: f32[3,5]"),
        (lambda: X.reshape(15, 1) @ X.reshape(1, 15), "", "f32[3,5]"),
        (lambda: jnp.pad(X, ((0, 61), (0, 0))), "", "f32["),
        (lambda: jnp.arange(977) * 1, "", "no arguments"),
    ],
    ids=["jit", "lower and compile", "vmap", "eager", "eager pad", "eager without arguments"],
)
def test_every_way_to_compile_is_refused_before_xla(
    work: Callable[[], Any], name: str, arguments: str, compiled: list[str]
) -> None:
    jax.clear_caches()  # Beside what another test padded, it would be told what differs.
    with forbid_compile("sealed by a test"), pytest.raises(RecompileError) as caught:
        work()

    assert not compiled
    assert caught.value.where is not None
    assert re.fullmatch(r"sealed by a test, called from .*test_guard.py:\d+", caught.value.where)
    assert f"refused to compile `{name}" in str(caught.value)
    assert arguments in str(caught.value)
    assert "do the work in numpy" in str(caught.value)

    work()  # Positive control: unsealed, the same work compiles.
    assert any(seen.startswith(f"jit_{name}") for seen in compiled)


def test_scalars_and_several_arguments_are_spelled_out() -> None:
    def scale(x: Any, by: Any) -> Any:
        return x * by

    with (
        forbid_compile(),
        pytest.raises(RecompileError, match=r"for x: f32\[3,5\], by: i32\[\]; nothing"),
    ):
        jax.jit(scale)(X, np.int32(2))


def test_what_is_compiled_in_memory_still_runs() -> None:
    half = jax.jit(fresh())
    ahead = jax.jit(fresh()).lower(X).compile()
    half(X)
    with forbid_compile():
        np.testing.assert_array_equal(half(X), np.asarray(X) / 2)
        np.testing.assert_array_equal(ahead(X), np.asarray(X) / 2)
        with pytest.raises(RecompileError, match=r"f32\[2,5\]"):
            half(np.ones((2, 5), np.float32))


def test_seals_nest() -> None:
    half = jax.jit(fresh())
    with forbid_compile("outer"):
        with forbid_compile("inner"), pytest.raises(RecompileError, match=r"^inner, called from "):
            half(X)
        with pytest.raises(RecompileError, match=r"^outer, called from "):
            half(X)
    half(X)


def test_seals_may_end_in_any_order() -> None:
    half = jax.jit(fresh())
    guard.seal("first")
    guard.seal("second")
    guard.unseal("first")
    with pytest.raises(RecompileError, match=r"^second, called from "):
        half(X)
    guard.unseal("second")
    half(X)


def test_an_error_inside_lifts_the_seal() -> None:
    before = hooks.compile_function()
    with pytest.raises(ZeroDivisionError), forbid_compile():
        raise ZeroDivisionError

    assert hooks.compile_function() is before
    jax.jit(fresh())(X)


def test_a_seal_holds_in_every_thread() -> None:
    caught: list[BaseException] = []

    def work() -> None:
        try:
            jax.jit(fresh())(X)
        except RecompileError as error:
            caught.append(error)

    with forbid_compile():
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    assert len(caught) == 4
    work()
    assert len(caught) == 4


def test_one_place_may_compile_and_it_is_noted() -> None:
    before = len(guard.allowed())
    caught: list[BaseException] = []

    def other() -> None:
        try:
            jax.jit(fresh())(X)
        except RecompileError as error:
            caught.append(error)

    with forbid_compile():
        with allow_compile("the sampler is not warmed yet"):
            np.testing.assert_array_equal(jax.jit(fresh())(X), np.asarray(X) / 2)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
        with pytest.raises(RecompileError):
            jax.jit(fresh())(X)
    (noted,) = guard.allowed()[before:]
    assert (noted.function, noted.reason) == ("half", "the sampler is not warmed yet")
    assert noted.seconds > 0
    assert len(caught) == 1


def test_to_allow_needs_a_reason() -> None:
    with pytest.raises(ValueError, match="needs a reason"), allow_compile(" "):
        pass


def signature(*shapes: tuple[int, ...]) -> Signature:
    inputs = tuple(ArraySpec(shape=s, dtype="float32", name=f"x{n}") for n, s in enumerate(shapes))
    return Signature(
        function="half",
        inputs=inputs,
        outputs=(),
        donated=(),
        kept=tuple(range(len(shapes))),
        in_tree="",
        out_tree="",
    )


@pytest.mark.parametrize(
    ("variants", "text"),
    [
        (
            {"half/t4": signature((4, 5)), "half/t9": signature((9, 9), (1,))},
            "(nearest variant `half/t4`) x: f32[3,5], shape was [4,5]",
        ),
        (
            {"half/t9": signature((9, 9), (1,))},
            "x: f32[3,5], was not there; x0: not there, was f32[9,9]",
        ),
        ({"half/t3": signature((3, 5))}, "(nearest variant `half/t3`) the same arguments"),
    ],
)
def test_a_refusal_names_the_nearest_variant_and_what_differs(
    variants: dict[str, Signature], text: str
) -> None:
    guard.seal("sealed by a test", variants)
    try:
        with pytest.raises(RecompileError) as caught:
            jax.jit(fresh())(X)
    finally:
        guard.unseal("sealed by a test")
    assert text in f"{caught.value.expected} {caught.value.found}"


def test_calls_of_what_is_compiled_do_not_pass_the_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    half = jax.jit(fresh())
    half(X)
    monkeypatch.setattr(guard, "_guard", None)  # Any call of it would fail.
    with forbid_compile():
        half(X)


@pytest.mark.usefixtures("compiled")
def test_allow_compile_lets_this_block_through_and_records_it() -> None:
    half = jax.jit(fresh())
    before = len(guard.allowed())

    guard.seal("sealed by a runtime")
    with forbid_compile("inner"):
        with allow_compile("the profiler needs it"):
            half(X)
        with pytest.raises(RecompileError):
            half(X[:1])
    guard.unseal("sealed by a runtime")

    (entry,) = guard.allowed()[before:]
    assert (entry.function, entry.reason) == ("half", "the profiler needs it")
    assert 0 < entry.seconds < 60


def test_allowances_nest_and_name_the_inner_reason() -> None:
    x = np.ones(3, np.float32)
    before = len(guard.allowed())
    with forbid_compile(), allow_compile("outer"):
        with allow_compile("inner"):
            jax.jit(fresh())(x)
        jax.jit(fresh())(x)

    assert [entry.reason for entry in guard.allowed()[before:]] == ["inner", "outer"]


def test_nothing_is_recorded_where_nothing_is_sealed() -> None:
    before = guard.allowed()
    with allow_compile("not sealed"):
        jax.jit(fresh())(X)

    assert guard.allowed() == before


@pytest.mark.parametrize("reason", ["", "  ", None, 3])
def test_allow_compile_needs_a_reason(reason: Any) -> None:
    with pytest.raises(ValueError, match="needs a reason"), allow_compile(reason):
        pass


def test_an_error_inside_ends_the_allowance() -> None:
    with pytest.raises(ZeroDivisionError), allow_compile("a test"):
        raise ZeroDivisionError
    with forbid_compile(), pytest.raises(RecompileError):
        jax.jit(fresh())(X)


def test_other_threads_stay_sealed() -> None:
    refused: list[RecompileError] = []

    def work() -> None:
        try:
            jax.jit(fresh())(X)
        except RecompileError as error:
            refused.append(error)

    async def through_asyncio() -> None:
        await asyncio.to_thread(work)  # Copies this context into the other thread.

    with forbid_compile(), allow_compile("this thread only"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        asyncio.run(through_asyncio())
        jax.jit(fresh())(X)

    assert len(refused) == 2


def test_another_task_of_the_same_thread_stays_sealed() -> None:
    async def allowing(ready: asyncio.Event, done: asyncio.Event) -> None:
        with allow_compile("this task only"):
            ready.set()
            await done.wait()
            jax.jit(fresh())(X)

    async def both() -> None:
        ready, done = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(allowing(ready, done))
        await ready.wait()
        with pytest.raises(RecompileError):
            jax.jit(fresh())(X)
        done.set()
        await task

    with forbid_compile():
        asyncio.run(both())
