"""The only package that touches private JAX names. Works on jax 0.10.2 up to 0.12.

Everything that a release of JAX may move stands here and in the files beside: `constants` (what a
function closes over), `described` (calls as JSON), `dispatch` (calls of `aot_lora.jit`), `donation`
(what a call takes over), `hooks` (compiles on their way to XLA), `layouts` and `placement` (layouts
and shardings as text), `stack` (who asked for a compile) and `trees` (pytrees as text). Tests run
all of it on each supported release.
"""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import api_util, compilation_cache, compiler, core, pjit, stages, tree_util
from jax._src import config as jax_config
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

from aot_lora._jax_compat import donation, mosaic_gpu
from aot_lora._jax_compat.layouts import layout_of
from aot_lora._jax_compat.trees import tree_of, tree_text
from aot_lora.errors import ProgramError
from aot_lora.signature import ArraySpec, Signature


def signature_of(traced: Any, lowered: Any, *, own_nodes: bool = False) -> Signature:
    """The signature of a traced and lowered function.

    Args:
      traced: what `jax.jit(f).trace(...)` returned.
      lowered: what `traced.lower(...)` returned.
      own_nodes: as of `trees.tree_text`.

    Raises:
      ProgramError: a pytree of it holds other nodes than `tree_text` can write.
    """
    leaves = tree_util.tree_flatten_with_path(lowered.args_info)[0]
    names = _argument_names(lowered, leaves)
    inputs = tuple(_spec(info, name) for (_, info), name in zip(leaves, names, strict=True))
    outputs = tuple(_spec(aval, "") for aval in traced.jaxpr.out_avals)
    return Signature(
        function=str(traced.fun_name),
        inputs=inputs,
        outputs=outputs,
        donated=tuple(i for i, (_, info) in enumerate(leaves) if info.donated),
        kept=tuple(sorted(lowered._lowering.compile_args["kept_var_idx"])),
        in_tree=tree_text(lowered.in_tree, own_nodes=own_nodes),
        out_tree=tree_text(lowered.out_tree, own_nodes=own_nodes),
    )


_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")


def refuse_callbacks(traced: Any) -> None:
    """Refuses a traced function that calls back into Python, which no stored executable can.

    Raises:
      ProgramError: it does; names the primitive.
    """
    pending = [traced.jaxpr.jaxpr]
    while pending:
        for equation in pending.pop().eqns:
            if equation.primitive.name in _CALLBACKS:
                raise ProgramError(
                    "the program calls back into Python",
                    found=equation.primitive.name,
                    next_step="remove jax.debug.print, pure_callback and the like from it",
                )
            # A Pallas kernel prints on the device, not in Python.
            if equation.primitive.name != "pallas_call":
                pending += core.jaxprs_in_params(equation.params)


@contextmanager
def config_kept(where: str, *, silent: tuple[str, ...]) -> Generator[None]:
    """Refuses a block that changes `jax.config`, and takes its changes back.

    What is set in code is in no key: another process would trace or compile something else.

    Args:
      where: what runs inside, for the error.
      silent: prefixes of the options' environment names that cannot change an executable.

    Raises:
      ProgramError: an option changed; names it.
    """
    before = dict(jax.config.values)
    try:
        yield
    finally:
        changed = [name for name, value in jax.config.values.items() if value != before.get(name)]
        changed = [name for name in changed if not name.upper().startswith(silent)]
        for name in changed:
            jax.config.update(name, before[name])
    if changed:
        raise ProgramError(
            f"it changes jax.config: {', '.join(changed)}",
            where=where,
            expected="options that aot-lora can see: they are part of an executable's key",
            next_step=f"set {changed[0].upper()} in the environment of warmup and server instead",
        )


def _argument_names(lowered: Any, leaves: list[Any]) -> list[str]:
    info = lowered._lowering.compile_args.get("all_args_info")
    names = info.debug_info.arg_names if info is not None else None
    if names is not None and len(names) == len(leaves):
        return [str(name) for name in names]
    return [tree_util.keystr(path[1:]) for path, _ in leaves]


def _spec(info: Any, name: str) -> ArraySpec:
    aval = getattr(info, "_aval", info)
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        raise ProgramError(
            "an argument or result is of a dtype that only JAX knows",
            expected="numbers or booleans",
            found=f"{name or 'a result'}: {aval}",
            next_step="pass jax.random.key_data(key), and wrap it inside with wrap_key_data",
        )
    return ArraySpec(
        shape=tuple(aval.shape),
        dtype=aval.dtype.name,
        weak_type=bool(getattr(aval, "weak_type", False)),
        name=name,
    )


def serialize(compiled: Any) -> bytes:
    """The raw PJRT bytes of an executable; no pickle.

    Raises:
      ProgramError: it calls back into Python or holds arrays, which no stored executable can.
    """
    unloaded = compiled._executable._unloaded_executable
    if unloaded.host_callbacks or unloaded.ordered_effects or unloaded.unordered_effects:
        raise ProgramError(
            "the program calls back into Python",
            next_step="remove jax.debug.print, pure_callback and the like from it",
        )
    if compiled._params.const_args or (unloaded.mut and unloaded.mut.in_mut):
        raise ProgramError(  # Constants are named before the compile, by `constants`.
            "the program closes over arrays",
            next_step="pass them as arguments",
        )
    return bytes(compiled.runtime_executable().serialize())


@contextmanager
def without_cache() -> Generator[None]:
    """Compiles past JAX's persistent cache, for the whole process.

    An executable of a CPU that comes from that cache serializes without its code, and without a
    word: it loads, and fails when it is run ("Function ... not found").
    """
    inner = compilation_cache.is_cache_used
    compilation_cache.is_cache_used = lambda *_, **__: False
    try:
        yield
    finally:
        compilation_cache.is_cache_used = inner


def load(raw: bytes, signature: Signature, device: Any) -> Any:
    """Loads raw PJRT bytes as a `jax.stages.Compiled`, without tracing or compiling.

    Bad bytes may abort the process: check them first.

    Args:
      raw: what `serialize` returned.
      signature: of the same program.
      device: the one device to run on.
    """
    sharding = SingleDeviceSharding(device)
    return load_placed(
        raw,
        signature,
        (device,),
        in_shardings=[sharding] * len(signature.kept),
        out_shardings=[sharding] * len(signature.outputs),
        committed=False,
    )


def load_placed(
    raw: bytes,
    signature: Signature,
    devices: Sequence[Any],
    *,
    in_shardings: Sequence[Any],
    out_shardings: Sequence[Any],
    committed: bool,
) -> Any:
    """As `load`, on one or several devices with the shardings it was compiled for.

    Args:
      raw: what `serialize` returned.
      signature: of the same program.
      devices: in the order of the program's device assignment.
      in_shardings: of the kept inputs.
      out_shardings: of all results.
      committed: whether results are committed to the devices.
    """
    mosaic_gpu.ready_to_load(raw)
    client = devices[0].client
    device_list = xla_client.DeviceList(tuple(devices))
    executable = client.deserialize_executable(raw, device_list, _options(tuple(devices)))
    in_avals = [_aval(spec) for spec in signature.inputs]
    kept_avals = [in_avals[i] for i in signature.kept]
    out_avals = [_aval(spec) for spec in signature.outputs]
    layouts = [layout_of(text) for text in signature.layouts] or [None] * len(kept_avals)
    loaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=device_list,
        backend=client,
        input_avals=kept_avals,
        input_shardings=list(in_shardings),
        output_avals=out_avals,
        output_shardings=list(out_shardings),
        committed=committed,
        name=signature.function,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(signature.kept),
        mut=None,
        xla_in_layouts=layouts,
        dispatch_in_layouts=layouts,
        xla_out_layouts=[None] * len(out_avals),
        all_args_info=None,
        pgle_profiler=None,
    ).load()
    args_info = jax.tree.unflatten(
        tree_of(signature.in_tree),
        [stages.ArgInfo(aval, i in signature.donated) for i, aval in enumerate(in_avals)],
    )
    out_tree = tree_of(signature.out_tree)
    on_mesh = donation.NEEDED and len(devices) > 1 and signature.donated
    if on_mesh or signature.layouts:
        return donation.CheckedCompiled(loaded, [], args_info, out_tree).check(signature)
    return stages.Compiled(loaded, [], args_info, out_tree)


@cache
def _options(devices: tuple[Any, ...]) -> Any:
    """Options that move an executable to these devices; without, it stays where it was compiled.

    A call with arrays of other devices than those then ends the process (CPU, 0.10.2 and 0.12).
    """
    ids = np.array([[device.id for device in devices]])
    return compiler.get_compile_options(1, len(devices), device_assignment=ids)


def _aval(spec: ArraySpec) -> Any:
    return core.ShapedArray(spec.shape, jax.numpy.dtype(spec.dtype), weak_type=spec.weak_type)


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
