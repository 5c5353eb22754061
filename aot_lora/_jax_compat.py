"""The only module that touches private JAX names. Works on jax 0.10.2 up to 0.12.

Everything that a release of JAX may move stands here, and `tests/test_jax_compat.py` runs it on
each supported one.
"""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import base64
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
from jax._src import compiler, core, stages, tree_util
from jax._src.interpreters import pxla
from jax._src.lib import xla_client
from jax.sharding import SingleDeviceSharding

from aot_lora.errors import ProgramError
from aot_lora.signature import ArraySpec, Signature


def signature_of(traced: Any, lowered: Any) -> Signature:
    """The signature of a traced and lowered function.

    Args:
      traced: what `jax.jit(f).trace(...)` returned.
      lowered: what `traced.lower(...)` returned.

    Raises:
      ProgramError: a pytree of it holds other nodes than tuples, lists, dicts and None.
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
        in_tree=_tree_text(lowered.in_tree),
        out_tree=_tree_text(lowered.out_tree),
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


def _tree_text(tree: Any) -> str:
    try:
        return base64.b64encode(tree.serialize_using_proto()).decode()
    except ValueError:
        raise ProgramError(
            "an argument or result holds a pytree node of its own kind",
            expected="tuples, lists, dicts and None around the arrays",
            found=str(tree)[:200],
            next_step="flatten it into a dict or tuple at the program's edge",
        ) from None


@cache  # the variants of a program share theirs
def _tree(text: str) -> Any:
    registry = tree_util.default_registry
    return tree_util.PyTreeDef.deserialize_using_proto(registry, base64.b64decode(text))


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
        raise ProgramError(
            "the program closes over arrays",
            next_step="pass them as arguments",
        )
    return bytes(compiled.runtime_executable().serialize())


def load(raw: bytes, signature: Signature, device: Any) -> Any:
    """Loads raw PJRT bytes as a `jax.stages.Compiled`, without tracing or compiling.

    Bad bytes may abort the process: check them first.

    Args:
      raw: what `serialize` returned.
      signature: of the same program.
      device: the one device to run on.
    """
    client = device.client
    devices = xla_client.DeviceList((device,))
    executable = client.deserialize_executable(
        raw, devices, None if device.platform == "gpu" else xla_client.CompileOptions()
    )
    sharding = SingleDeviceSharding(device)
    in_avals = [_aval(spec) for spec in signature.inputs]
    kept_avals = [in_avals[i] for i in signature.kept]
    out_avals = [_aval(spec) for spec in signature.outputs]
    loaded = pxla.UnloadedMeshExecutable(
        xla_executable=executable,
        device_list=devices,
        backend=client,
        input_avals=kept_avals,
        input_shardings=[sharding] * len(kept_avals),
        output_avals=out_avals,
        output_shardings=[sharding] * len(out_avals),
        committed=False,
        name=signature.function,
        unordered_effects=[],
        ordered_effects=[],
        keepalive=[],
        host_callbacks=[],
        kept_var_idx=set(signature.kept),
        mut=None,
        xla_in_layouts=[None] * len(kept_avals),
        dispatch_in_layouts=[None] * len(kept_avals),
        xla_out_layouts=[None] * len(out_avals),
        all_args_info=None,
        pgle_profiler=None,
    ).load()
    args_info = jax.tree.unflatten(
        _tree(signature.in_tree),
        [stages.ArgInfo(aval, i in signature.donated) for i, aval in enumerate(in_avals)],
    )
    return stages.Compiled(loaded, [], args_info, _tree(signature.out_tree))


def _aval(spec: ArraySpec) -> Any:
    return core.ShapedArray(spec.shape, jax.numpy.dtype(spec.dtype), weak_type=spec.weak_type)


def compile_hook() -> Callable[..., Any]:
    """The one function through which every compile of the process passes, on its way to XLA."""
    return compiler.compile_or_get_cached


def set_compile_hook(function: Callable[..., Any]) -> None:
    """Replaces it. Called with (backend, computation, ...); its result is the executable."""
    compiler.compile_or_get_cached = function


def computation_text(computation: Any) -> tuple[str, tuple[str, ...]]:
    """The name and the argument types of a module on its way to XLA."""
    name = str(computation.operation.attributes["sym_name"]).strip('"')
    for operation in computation.body.operations:
        if operation.name in ("main", '"main"') or str(operation.name).strip('"') == "main":
            return name, tuple(_type_text(kind) for kind in operation.type.inputs)
    return name, ()


def _type_text(kind: Any) -> str:
    text = str(kind).removeprefix("tensor<").removesuffix(">")
    *sizes, dtype = text.split("x")
    return f"{dtype}[{','.join(sizes)}]"
