"""Private JAX, on whichever release is installed: what is loaded is what was compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aot_lora import _jax_compat
from aot_lora._jax_compat import calls, hooks
from aot_lora.errors import ProgramError

F32 = jax.ShapeDtypeStruct((4,), "float32")
WEAK = jax.ShapeDtypeStruct((), "float32", weak_type=True)
NESTED = {"q": (F32, None), "k": [F32, {"deep": jax.ShapeDtypeStruct((2, 4), "bfloat16")}]}

# Program: function, abstract arguments, donated arguments.
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]] = {
    "one": (lambda x: x + 1, (F32,), ()),
    "no arguments": (lambda: jnp.arange(3), (), ()),
    "no results": (lambda x: None, (F32,), ()),
    "donated": (lambda x, y: (x + y, x * y), (F32, F32), (0,)),
    "donated twice": (lambda x, y: (x + y, x * y), (F32, F32), (0, 1)),
    "unused": (lambda a, x, b: x * 2, (F32, F32, F32), ()),
    "unused and donated": (lambda a, x: x * 2, (F32, F32), (0, 1)),
    "nested": (
        lambda p, x: {"out": (p["q"][0] + x, None), "rest": [p["k"], {}]},
        (NESTED, F32),
        (0,),
    ),
    "same result twice": (lambda x: (x, x, -x), (F32,), ()),
    "weak": (lambda x, s: (x * s, s + 1), (F32, WEAK), ()),
    "python scalar": (lambda x, s: x * s, (F32, 2.0), ()),
    "integers": (lambda x, i: x[i], (F32, jax.ShapeDtypeStruct((2,), "int32")), ()),
    "booleans": (lambda x: x > 0, (F32,), ()),
    "empty": (lambda x: x.sum(), (jax.ShapeDtypeStruct((0, 3), "float32"),), ()),
    "constant": (lambda x: x + np.arange(4, dtype="float32"), (F32,), ()),
}


def values(args: Any) -> Any:
    """Fresh arrays for abstract arguments: donation takes them."""

    def value(spec: Any) -> Any:
        if not isinstance(spec, jax.ShapeDtypeStruct) or spec.weak_type:
            return 3.0
        count = int(np.prod(spec.shape))
        return jnp.asarray(np.arange(count).reshape(spec.shape) % 4, dtype=spec.dtype)

    return jax.tree.map(value, args)


def lower(name: str) -> tuple[Any, Any]:
    fn, args, donate = PROGRAMS[name]
    traced = jax.jit(fn, donate_argnums=donate).trace(*args)
    return traced, traced.lower()


def leaves(tree: Any) -> list[tuple[Any, ...]]:
    return [
        (leaf.dtype, leaf.weak_type, leaf.shape, np.asarray(leaf).tobytes())
        for leaf in jax.tree.leaves(tree)
    ]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_loaded_is_what_was_compiled(name: str) -> None:
    traced, lowered = lower(name)
    compiled = lowered.compile()
    signature = _jax_compat.signature_of(traced, lowered)
    loaded = _jax_compat.load(_jax_compat.serialize(compiled), signature, jax.devices()[0])
    args, twin = values(PROGRAMS[name][1]), values(PROGRAMS[name][1])

    expected, found = compiled(*args), loaded(*twin)

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert leaves(found) == leaves(expected)
    taken = [
        [a.is_deleted() for a in jax.tree.leaves(t) if isinstance(a, jax.Array)]
        for t in (args, twin)
    ]
    assert taken[0] == taken[1]
    assert loaded.in_tree == compiled.in_tree
    donated = [[i.donated for i in jax.tree.leaves(c.args_info)] for c in (loaded, compiled)]
    assert donated[0] == donated[1]


@pytest.mark.parametrize("name", ["donated", "unused"])
def test_a_loaded_program_refuses_what_it_was_not_compiled_for(name: str) -> None:
    traced, lowered = lower(name)
    raw = _jax_compat.serialize(lowered.compile())
    loaded = _jax_compat.load(raw, _jax_compat.signature_of(traced, lowered), jax.devices()[0])
    right = [jnp.ones(4)] * len(PROGRAMS[name][1])

    for wrong in (jnp.ones(5), jnp.ones(4, "int32"), {"x": jnp.ones(4)}):
        with pytest.raises(TypeError):
            loaded(right[0], wrong, *right[2:])
    with pytest.raises(TypeError):
        loaded(*right[1:])


def test_a_signature_names_arguments_by_their_path_and_keeps_the_unused() -> None:
    assert str(_jax_compat.signature_of(*lower("nested"))) == (
        "donated p['k'][0]: f32[4], donated p['k'][1]['deep']: bf16[2,4], "
        "donated p['q'][0]: f32[4], x: f32[4] -> f32[4], f32[4], bf16[2,4]"
    )
    unused = _jax_compat.signature_of(*lower("unused"))
    assert ([spec.name for spec in unused.inputs], unused.kept) == (["a", "x", "b"], (1,))


def test_a_signature_knows_weak_types_of_arguments_and_results() -> None:
    signature = _jax_compat.signature_of(*lower("weak"))

    assert str(signature) == "x: f32[4], s: ~f32[] -> f32[4], ~f32[]"


def test_trees_of_one_shape_but_another_kind_are_told_apart() -> None:
    def tree(fn: Callable[..., Any]) -> str:
        traced = jax.jit(fn).trace(F32)
        return _jax_compat.signature_of(traced, traced.lower()).out_tree

    kinds = [lambda x: (x,), lambda x: [x], lambda x: (x, None), lambda x: {"x": x}, lambda x: x]
    assert len({tree(kind) for kind in kinds}) == len(kinds)


def test_a_callback_is_refused_even_where_tracing_did_not_look() -> None:
    def printing(x: Any) -> Any:
        jax.debug.print("{}", x)
        return x

    traced = jax.jit(printing).trace(F32)

    with pytest.raises(ProgramError, match="calls back into Python"):
        _jax_compat.refuse_callbacks(traced)
    with pytest.raises(ProgramError, match="calls back into Python"):
        _jax_compat.serialize(traced.lower().compile())


def test_the_compile_hook_sees_every_compile_and_its_text() -> None:
    seen: list[tuple[str, tuple[str, ...]]] = []

    def spy(real: Any, backend: Any, computation: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(hooks.computation_text(computation))
        return real(backend, computation, *args, **kwargs)

    def ahead(x: Any, y: Any) -> Any:
        return x @ y - 1

    def at_once(x: Any, y: Any) -> Any:
        return x @ y - 2

    args = (np.zeros((2, 3), "float32"), np.zeros(3, "float32"))
    with hooks.compile_hook(spy):
        jax.jit(ahead).lower(*args).compile()
        jax.jit(at_once)(*args)

    assert seen == [(f"jit_{name}", ("f32[2,3]", "f32[3]")) for name in ("ahead", "at_once")]


def seen_by_the_hook(work: Callable[[], Any]) -> Any:
    """What `calls_at_hand` finds for the last compile of `work`."""
    seen: list[Any] = []

    def spy(real: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(calls.calls_at_hand())
        return real(*args, **kwargs)

    with hooks.compile_hook(spy):
        work()
    return seen[-1]


def test_the_call_under_way_is_read_with_all_its_parts() -> None:
    def scaled(p: Any, by: Any, twice: bool = False, *, unused: Any = None) -> Any:
        return p["x"] * by

    f = jax.jit(scaled, static_argnames="twice", donate_argnums=0)
    device = jax.devices()[0]
    x = jax.device_put(np.ones((2, 3), "float32"), device)

    call, earlier = seen_by_the_hook(lambda: f({"x": x}, 2.0, twice=True, unused=np.float64(1)))

    assert not earlier
    assert (call.function, call.results) == ("scaled", ("f32[2,3]",))
    assert call.place == f"{__file__}:{scaled.__code__.co_firstlineno}"
    assert [f"{a.spec.name} {a.spec} {a.kind}".strip() for a in call.arguments] == [
        "p['x'] f32[2,3]",
        "by ~f32[] Python float",
        "unused f32[] numpy float64",
    ]
    assert [a.committed for a in call.arguments] == [True, False, False]
    assert call.arguments[0].sharding == str(device)
    assert [a.donated for a in call.arguments] == [True, False, False]
    assert call.static == {"twice": True}
    assert call.tree == jax.tree.structure((({"x": 0}, 0), {"unused": 0}))
    assert call.options["keep_unused"] is False
    assert call.context["jax_enable_x64"] is False
    assert call.wrapped is scaled


def test_earlier_calls_are_those_that_were_compiled() -> None:
    def once(x: Any) -> Any:
        return x + 1

    f = jax.jit(once)
    f(np.ones(2))
    f.lower(np.ones(3)).compile()
    f.lower(np.ones(4))

    call, earlier = seen_by_the_hook(lambda: f(np.ones(5)))

    assert call.arguments[0].spec.shape == (5,)
    assert sorted(c.arguments[0].spec.shape for c in earlier) == [(2,), (3,)]
    assert all(c.static == {} and c.wrapped is once for c in earlier)


def test_looking_at_the_calls_traces_and_lowers_nothing() -> None:
    from jax._src import pjit

    def once(x: Any) -> Any:
        return x + 1

    f = jax.jit(once)
    f(np.ones(2))
    sizes: list[Any] = []

    def look(real: Any, *args: Any, **kwargs: Any) -> Any:
        before = [c.cache_info().misses for c in (pjit._pjit_lower, pjit._infer_params_cached)]
        calls.calls_at_hand()
        after = [c.cache_info().misses for c in (pjit._pjit_lower, pjit._infer_params_cached)]
        sizes.append((before, after))
        return real(*args, **kwargs)

    with hooks.compile_hook(look):
        f(np.ones(3))

    assert sizes
    assert all(before == after for before, after in sizes)


def test_no_call_is_found_where_nothing_is_compiled() -> None:
    assert calls.calls_at_hand() == (None, ())


def test_a_call_described_ahead_is_the_one_that_is_made() -> None:
    def scaled(p: Any, *rest: Any, by: Any = 1) -> Any:
        return p["x"] * by + rest[0]

    args, kwargs = ({"x": np.ones((2, 3), "float32")}, np.float64(1)), {"by": 2.0}

    made, _ = seen_by_the_hook(lambda: jax.jit(scaled)(*args, **kwargs))
    ahead = calls.call_of(scaled, *args, **kwargs)

    assert ahead.arguments == made.arguments
    assert ahead.tree == made.tree


def test_a_signature_is_the_call_that_it_was_warmed_for() -> None:
    traced, lowered = lower("donated")
    call = calls.call_of_signature(_jax_compat.signature_of(traced, lowered))

    assert [(a.spec.name, a.donated) for a in call.arguments] == [("x", True), ("y", False)]
    assert call.tree == lowered.in_tree


def test_hooks_go_in_any_order_and_leave_jax_as_it_was() -> None:
    before, seen = hooks.compile_function(), []

    def spy(name: str) -> Callable[..., Any]:
        def hook(real: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return real(*args, **kwargs)

        return hook

    first, second = spy("first"), spy("second")
    hooks.add_compile_hook(first)
    hooks.add_compile_hook(second)
    jax.jit(lambda x: x - 41)(np.ones(2))
    hooks.remove_compile_hook(first)
    jax.jit(lambda x: x - 42)(np.ones(2))
    hooks.remove_compile_hook(second)

    assert seen == ["second", "first", "second"]
    assert hooks.compile_function() is before
