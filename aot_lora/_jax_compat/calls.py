"""Calls that JAX compiles: what they were made with, found on the way to XLA and in its caches."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax._src import api_util, core, pjit, stages, tree_util
from jax._src import config as jax_config
from jax._src.interpreters import pxla

from aot_lora._jax_compat.trees import tree_of
from aot_lora.signature import ArraySpec, Signature


@dataclass(frozen=True, slots=True, kw_only=True)
class Argument:
    """One flattened argument of a call.

    Args:
      spec: what JAX makes of it; its name is its path, as in a `Signature`.
      kind: what it was where that matters: ``Python float``, or ``numpy float64`` for a dtype that
        JAX casts away; empty otherwise and where unknown.
      committed: whether it was put on its devices by the caller; None where unknown.
      sharding: where it lies, in words; empty where not committed.
      elsewhere: committed to other devices than the first one of this host's, which runs what
        a store holds.
      donated: whether the call gives it away.
    """

    spec: ArraySpec
    kind: str = ""
    committed: bool | None = None
    sharding: str = ""
    elsewhere: bool = False
    donated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """A call that was, or is to be, compiled. Unknown parts are None.

    Args:
      function: its name.
      place: its source, ``file:line``; empty where unknown.
      arguments: flattened.
      results: types, in order.
      tree: the pytree of ((arguments), {keywords}), static ones left out.
      out_tree: of the results.
      static: values of the static arguments, by name.
      options: what else JAX distinguishes: donation is with the arguments, the rest is here.
      context: JAX's options and context managers that a trace depends on.
      trace: what the function was traced to; calls may share it and differ in placement.
      wrapped: the Python function.
    """

    function: str
    arguments: tuple[Argument, ...]
    place: str = ""
    results: tuple[str, ...] | None = None
    tree: Any = None
    out_tree: Any = None
    static: Mapping[str, Any] | None = None
    options: Mapping[str, Any] | None = None
    context: Mapping[str, Any] | None = None
    trace: Any = None
    wrapped: Any = None


def call_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Describes a call with arrays, abstract arrays or numbers, without making it."""
    leaves, tree = tree_util.tree_flatten((args, kwargs))
    debug = api_util.debug_info("jit", function, args, kwargs)
    arguments: list[Argument] = []
    for value, name in zip(leaves, debug.safe_arg_names(len(leaves)), strict=True):
        where = getattr(value, "sharding", None) if getattr(value, "committed", False) else None
        arguments.append(_argument(core.shaped_abstractify(value), name, where, value))
    name = getattr(function, "__name__", str(function))
    return Call(function=name, arguments=tuple(arguments), tree=tree, static={})


def call_of_signature(signature: Signature) -> Call:
    """What an executable was warmed for, to compare calls with."""
    return Call(
        function=signature.function,
        arguments=tuple(
            Argument(spec=spec, donated=i in signature.donated)
            for i, spec in enumerate(signature.inputs)
        ),
        tree=tree_of(signature.in_tree) if signature.in_tree else None,
    )


def calls_at_hand(*, earlier: bool = True) -> tuple[Call | None, tuple[Call, ...]]:
    """The call whose compile is under way, and earlier ones of that function that were compiled.

    For use inside the compile hook. The call is found on this thread's stack: JAX hands the hook
    no more than MLIR. What was compiled is in the keys of two caches of JAX. Functions are told
    apart by name and source line, so that one defined anew on each call is still found.

    Args:
      earlier: whether to look for those; costs as much as there are of them.

    Returns:
      (None, ()) where this release of JAX comes to its compiler by another way.
    """
    computation, values, lowered, traced_as = _under_way()
    if computation is None:
        return None, ()
    context = jax_config.trace_context()
    this: tuple[Any, dict[str, Any]] | None = None
    others: list[tuple[Any, dict[str, Any], Any]] = []
    for ref, seen, fields, named in pjit._pjit_lower.cache_keys():
        jaxpr = ref()
        if jaxpr is None or f"jit({fields[_NAME]})" != computation._name:
            continue
        if not earlier and traced_as is not None and jaxpr is not traced_as:
            continue
        key = dict(zip(_LOWERING, fields, strict=True))
        if seen != context:
            others.append((jaxpr, key, seen))
            continue
        # Its key is there, so this looks up. A lowering without an executable was refused, or
        # only looked at.
        lowering = pjit._pjit_lower(jaxpr, *fields, **named)
        if lowering is computation:
            this = jaxpr, key
            if not earlier:
                break
        elif lowering._executable is not None:
            others.append((jaxpr, key, seen))
    if this is None:  # Lowered under other options than it is compiled under.
        return _call_of_lowering(computation, lowered), ()
    source = this[0].debug_info.func_src_info
    traced = _traced(source, context, only=None if earlier else this[0])
    found = _with_trees(_call(this[0], this[1], context, traced, values), lowered)
    if not earlier:
        return found, ()
    return found, tuple(
        _call(jaxpr, key, seen, traced, None)
        for jaxpr, key, seen in others
        if jaxpr.debug_info.func_src_info == source
    )


# The arguments of `pjit._pjit_lower` after the jaxpr, as they stand in its keys.
_LOWERING: tuple[str, ...] = (
    "in_shardings",
    "out_shardings",
    "in_layouts",
    "out_layouts",
    "donated_invars",
    "ctx_mesh",
    "name",
    "keep_unused",
    "inline",
    "compiler_options_kvs",
)
_NAME = _LOWERING.index("name")
_OPTIONS = ("out_shardings", "in_layouts", "out_layouts", "ctx_mesh", "keep_unused", "inline")


def _under_way() -> tuple[Any, Sequence[Any] | None, Any, Any]:
    """The computation that this thread compiles; the values it was called with, or instead of those
    the `jax.stages.Lowered` that is compiled; and what it was traced to, where that is at hand."""
    compiles = pxla.MeshComputation.compile.__code__
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not compiles:
        frame = frame.f_back
    if frame is None:
        return None, None, None, None
    computation, above = frame.f_locals["self"], frame.f_back
    if above is not None and above.f_code is pjit._pjit_call_impl_python.__code__:
        given = above.f_locals
        return computation, given["args"], None, given["jaxpr"]
    if above is not None and above.f_code is stages.Lowered.compile.__code__:
        return computation, None, above.f_locals["self"], None
    return computation, None, None, None


def _with_trees(call: Call, lowered: Any) -> Call:
    if lowered is None:
        return call
    return replace(call, tree=lowered.in_tree, out_tree=lowered.out_tree)


class _Traced:
    """How a function was called to be traced: its own object, the pytree and static values."""

    def __init__(self, function: Any, info: Any, signature: Any, params: Any) -> None:
        self.function = function
        self.tree = params.in_tree
        self.out_tree = params.out_tree
        parameters = dict(info.fun_signature.parameters if info.fun_signature else {})
        names = list(parameters)
        # Values by position come first, then those by keyword, whose names stand beside.
        by_name = list(signature.static_arg_names)
        values = list(signature.static_args)
        numbers = sorted(info.static_argnums)[: len(values) - len(by_name)]
        by_position = [names[i] if i < len(names) else f"argument {i}" for i in numbers]
        given = dict(zip(by_position + by_name, values, strict=True))
        static = {*info.static_argnames, *(names[i] for i in info.static_argnums if i < len(names))}
        defaults = {
            name: parameter.default
            for name, parameter in parameters.items()
            if name in static and parameter.default is not inspect.Parameter.empty
        }
        self.static = defaults | given


def _traced(source: Any, context: Any, only: Any = None) -> dict[int, _Traced]:
    """The traces of the functions of that source line, by the identity of their jaxpr.

    Args:
      source: the line.
      context: only keys of this context can be looked up without tracing.
      only: stops at that jaxpr; a function may have been traced a thousand times.
    """
    found: dict[int, _Traced] = {}
    keys = [
        (function, fields, named)
        for ref, seen, fields, named in pjit._infer_params_cached.cache_keys()
        if seen == context
        and fields[0].fun_sourceinfo == source
        and (function := ref()) is not None
    ]
    if only is not None:  # The likely ones first.
        avals = tuple(only.in_avals)
        keys.sort(key=lambda key: avals[len(avals) - len(key[1][2]) :] != tuple(key[1][2]))
    for function, fields, named in keys:
        params = pjit._infer_params_cached(function, *fields, **named).pjit_params
        if params is not None:
            jaxpr = params.params["jaxpr"]
            found[id(jaxpr)] = _Traced(function, fields[0], fields[1], params)
            if jaxpr is only:
                break
    return found


def _call(
    jaxpr: Any,
    key: Mapping[str, Any],
    context: Sequence[Any],
    traces: Mapping[int, _Traced],
    values: Sequence[Any] | None,
) -> Call:
    avals, traced = jaxpr.in_avals, traces.get(id(jaxpr))
    names = _padded(jaxpr.debug_info.arg_names, len(avals))
    values = _padded(values, len(avals))
    parts = zip(avals, names, key["in_shardings"], values, key["donated_invars"], strict=True)
    context_names = jax_config.trace_context_names()
    if len(context_names) != len(context):
        context_names = tuple(f"option {i}" for i in range(len(context)))
    return Call(
        function=str(key["name"]),
        place=(jaxpr.debug_info.func_src_info or "").partition(" at ")[2],
        arguments=tuple(_argument(*part) for part in parts),
        results=tuple(str(_tolerant_spec(aval, "")) for aval in jaxpr.out_avals),
        tree=traced and traced.tree,
        out_tree=traced and traced.out_tree,
        static=traced and traced.static,
        options={name: key[name] for name in _OPTIONS} | dict(key["compiler_options_kvs"]),
        context=dict(zip(context_names, context, strict=True)),
        trace=jaxpr,
        wrapped=traced and traced.function,
    )


def _call_of_lowering(computation: Any, lowered: Any) -> Call | None:
    """The call of a lowering whose trace nobody holds any more."""
    given = computation.compile_args
    info = given.get("all_args_info")
    if info is None:
        return None
    names = _padded(info.debug_info.arg_names, len(info.in_avals))
    shardings = dict(zip(sorted(given["kept_var_idx"]), given["in_shardings"], strict=False))
    leaves = tree_util.tree_leaves(lowered.args_info) if lowered else []
    donated = [leaf.donated for leaf in leaves] if len(leaves) == len(names) else []
    call = Call(
        function=computation._name.removeprefix("jit(").removesuffix(")"),
        place=(info.debug_info.func_src_info or "").partition(" at ")[2],
        arguments=tuple(
            _argument(
                aval, name and str(name), shardings.get(i), None, bool(donated and donated[i])
            )
            for i, (aval, name) in enumerate(zip(info.in_avals, names, strict=True))
        ),
    )
    return _with_trees(call, lowered)


def _padded(items: Sequence[Any] | None, count: int) -> list[Any]:
    """`items` behind as many None as are missing: closed-over values come first, nameless."""
    items = list(items or ())
    return [None] * (count - len(items)) + items[:count]


def _argument(
    aval: Any, name: str | None, sharding: Any, value: Any = None, donated: bool = False
) -> Argument:
    kind = ""
    if type(value) in (bool, int, float, complex):
        kind = f"Python {type(value).__name__}"
    elif isinstance(value, np.ndarray | np.generic) and value.dtype != aval.dtype:
        kind = f"numpy {value.dtype}"
    spec = _tolerant_spec(aval, name or "a closed-over value")
    if not isinstance(sharding, jax.sharding.Sharding):  # Nothing, or JAX's "unspecified".
        return Argument(spec=spec, kind=kind, committed=False, donated=donated)
    devices = list(sharding._device_assignment)
    first = jax.local_devices(backend=devices[0].platform)[0]
    return Argument(
        spec=spec,
        kind=kind,
        committed=True,
        sharding=_sharding_text(sharding, devices),
        elsewhere=devices != [first],
        donated=donated,
    )


def _sharding_text(sharding: Any, devices: list[Any]) -> str:
    kind = sharding.memory_kind
    memory = "" if kind in (None, devices[0].default_memory().kind) else f" in {kind}"
    if len(devices) == 1:
        return f"{devices[0]}{memory}"
    spec = getattr(sharding, "spec", None)
    text = str(sharding) if spec is None else f"P({', '.join(map(repr, spec))})"
    return f"{text} over {len(devices)} devices{memory}"


def _tolerant_spec(aval: Any, name: str) -> ArraySpec:
    """As `_spec`, for a text only: keys and references pass."""
    return ArraySpec(
        shape=tuple(getattr(aval, "shape", ())),
        dtype=str(getattr(aval, "dtype", type(aval).__name__)),
        weak_type=bool(getattr(aval, "weak_type", False)),
        name=name,
    )


def tree_differences(expected: Any, found: Any) -> Iterator[tuple[Any, str, str, str]]:
    """Where two pytrees of ((arguments), {keywords}) part, from the top.

    Yields:
      ``0`` and a position or ``1`` and a keyword, or None where the arguments as such differ;
      the path inside that argument; what is there; what was expected.
    """
    for path, was, now, _ in tree_util.equality_errors_pytreedef(expected, found):
        top = None
        if len(path) > 1:
            keyword = tree_util.keystr(path[:1]) == "[1]"
            key = path[1]
            top = (int(keyword), key.key if keyword else key.idx)
        yield top, tree_util.keystr(path[2:]), _node(now), _node(was)


def _node(text: str) -> str:
    if text.startswith("<class '"):
        text = text.removeprefix("<class '").replace("'>", "")
    return "an array" if text == "pytree leaf" else text.replace("NoneType", "None")


def keywords(tree: Any) -> tuple[str, ...]:
    """The names passed by keyword, of a pytree of ((arguments), {keywords})."""
    return tuple(tree.children()[1].node_data()[1])
