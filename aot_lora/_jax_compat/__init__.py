"""The only package that touches private JAX names. Works on jax 0.10.2 up to 0.12.

Everything that a release of JAX may move stands here and in the files beside: `calls` (what was
compiled, and with what), `constants` (what a function closes over), `described` (calls as JSON),
`dispatch` (calls of `aot_lora.jit`), `donation` (what a call takes over), `hooks` (compiles on
their way to XLA), `layouts` and `placement` (layouts and shardings as text), `stack` (who asked for
a compile) and `trees` (pytrees as text). Tests run all of it on each supported release.
"""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import numpy as np
from jax._src import compilation_cache, compiler, core, stages, tree_util
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
