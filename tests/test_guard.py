"""The guard: a sealed process that asks for a compile gets an error before XLA starts."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot_lora import _jax_compat, allow_compile, forbid_compile
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
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of what reaches the compiler."""
    seen: list[str] = []
    inner = _jax_compat.compile_hook()

    def spy(backend: Any, computation: Any, *rest: Any, **named: Any) -> Any:
        seen.append(_jax_compat.computation_text(computation)[0])
        return inner(backend, computation, *rest, **named)

    monkeypatch.setattr(guard, "_compile", None)
    _jax_compat.set_compile_hook(spy)
    yield seen
    _jax_compat.set_compile_hook(inner)


@pytest.mark.parametrize(
    ("work", "name", "arguments"),
    [
        (lambda: jax.jit(fresh())(X), "jit_half", "f32[3,5]"),
        (lambda: jax.jit(fresh()).lower(X).compile(), "jit_half", "f32[3,5]"),
        (lambda: jax.jit(jax.vmap(fresh()))(X), "jit_half", "f32[3,5]"),
        (lambda: X.reshape(15, 1) @ X.reshape(1, 15), "jit_", "f32[3,5]"),
        (lambda: jnp.pad(X, ((0, 61), (0, 0))), "jit_", "f32["),
        (lambda: jnp.arange(977) * 1, "jit_", "a compile for arguments ()"),
    ],
    ids=["jit", "lower and compile", "vmap", "eager", "eager pad", "eager without arguments"],
)
def test_every_way_to_compile_is_refused_before_xla(
    work: Callable[[], Any], name: str, arguments: str, compiled: list[str]
) -> None:
    with forbid_compile("sealed by a test"), pytest.raises(RecompileError) as caught:
        work()

    assert not compiled
    assert caught.value.where == "sealed by a test"
    assert f"refused to compile `{name}" in str(caught.value)
    assert arguments in str(caught.value)
    assert "do the work in numpy" in str(caught.value)

    work()  # Positive control: unsealed, the same work compiles.
    assert any(seen.startswith(name) for seen in compiled)


def test_scalars_and_several_arguments_are_spelled_out() -> None:
    def scale(x: Any, by: Any) -> Any:
        return x * by

    with forbid_compile(), pytest.raises(RecompileError, match=r"\(f32\[3,5\], i32\[\]\)"):
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
        with forbid_compile("inner"), pytest.raises(RecompileError, match=r"^inner: "):
            half(X)
        with pytest.raises(RecompileError, match=r"^outer: "):
            half(X)
    half(X)


def test_seals_may_end_in_any_order() -> None:
    half = jax.jit(fresh())
    guard.seal("first")
    guard.seal("second")
    guard.unseal("first")
    with pytest.raises(RecompileError, match=r"^second: "):
        half(X)
    guard.unseal("second")
    half(X)


def test_an_error_inside_lifts_the_seal() -> None:
    before = _jax_compat.compile_hook()
    with pytest.raises(ZeroDivisionError), forbid_compile():
        raise ZeroDivisionError

    assert _jax_compat.compile_hook() is before
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
    assert (noted.function, noted.reason) == ("jit_half", "the sampler is not warmed yet")
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
            "x0 was f32[4,5]",
        ),
        ({"half/t9": signature((9, 9), (1,))}, "`half/t9`: it takes 2 arguments"),
        ({"half/t3": signature((3, 5))}, "`half/t3`: of the same arguments"),
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
    assert text in str(caught.value.expected)
