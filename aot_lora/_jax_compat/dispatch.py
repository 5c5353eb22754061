"""Calls that are looked up: JAX's own C++ dispatch, asked for an executable instead of a trace."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax._src import api_util, core, tree_util
from jax._src.interpreters import pxla
from jax._src.lib import _jax

from aot_lora._jax_compat.calls import Argument, _argument
from aot_lora._jax_compat.constants import refuse_held_arrays as refuse_held_arrays
from aot_lora._jax_compat.placement import is_traced, sharding_of, sharding_text
from aot_lora._jax_compat.trees import tree_text
from aot_lora.signature import Signature


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Given:
    """The arguments of one call, static ones apart.

    Args:
      leaves: the other arguments, flattened.
      tree: their pytree of ((arguments), {keywords}).
      static: values of the static arguments, by name.
      jitted: what `jax.jit` made of the function.
      args, kwargs: the call as it was made.
    """

    leaves: list[Any]
    tree: Any
    static: Mapping[str, Any]
    jitted: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def specs(self) -> list[tuple[tuple[int, ...], str, bool, str]]:
        """Of each leaf: shape, dtype, weak type, and its sharding where it is committed."""
        found: list[tuple[tuple[int, ...], str, bool, str]] = []
        for value in self.leaves:
            aval = core.shaped_abstractify(value)
            committed = getattr(value, "committed", False)
            where = sharding_text(value.sharding, rank=len(aval.shape)) if committed else ""
            found.append((tuple(aval.shape), str(aval.dtype), bool(aval.weak_type), where))
        return found

    def tree_text(self) -> str:
        """The pytree as in a `Signature`."""
        return tree_text(self.tree, own_nodes=True)

    def arguments(self) -> tuple[Argument, ...]:
        """The leaves with their names, to say what differs."""
        info = self.jitted._jit_info
        debug = api_util.debug_info(
            "jit",
            self.jitted._fun,
            self.args,
            dict(self.kwargs),
            static_argnums=info.static_argnums,
            static_argnames=info.static_argnames,
        )
        names = debug.safe_arg_names(len(self.leaves))
        return tuple(
            _argument(
                core.shaped_abstractify(value),
                name,
                value.sharding if getattr(value, "committed", False) else None,
                value,
            )
            for value, name in zip(self.leaves, names, strict=True)
        )


def given(jitted: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Given:
    """Splits a call's arguments as `jax.jit` does."""
    info = jitted._jit_info
    numbers = {n + len(args) if n < 0 else n for n in info.static_argnums}
    parameters = list(info.fun_signature.parameters) if info.fun_signature else []
    static = {
        parameters[n] if n < len(parameters) else f"argument {n}": args[n]
        for n in sorted(numbers)
        if 0 <= n < len(args)
    }
    static |= {name: kwargs[name] for name in info.static_argnames if name in kwargs}
    leaves, tree = tree_util.tree_flatten(
        (
            tuple(value for n, value in enumerate(args) if n not in numbers),
            {name: value for name, value in kwargs.items() if name not in info.static_argnames},
        )
    )
    return Given(leaves=leaves, tree=tree, static=static, jitted=jitted, args=args, kwargs=kwargs)


def dispatcher(jitted: Any, find: Callable[[Given], Any]) -> Any:
    """A callable with the arguments of `jitted` that runs what `find` returns.

    The first call of each kind asks `find`; JAX's C++ remembers its answer and makes all later
    ones, exactly as for `jax.jit`. Calls inside of a trace are part of that trace.

    Args:
      jitted: what `jax.jit` returned.
      find: from the call to a `jax.stages.Compiled` for it, or None for `jitted` itself.
        What it raises reaches the caller.
    """

    def miss(*args: Any, **kwargs: Any) -> Any:
        call = given(jitted, args, kwargs)
        if is_traced(call.leaves):
            return jitted(*args, **kwargs), None, False
        found = find(call)
        if found is None:
            return jitted(*args, **kwargs), None, False
        return _run(found, call.leaves)

    info = jitted._jit_info
    return _jax.pjit(
        getattr(jitted, "__name__", "jitted"),
        None,  # No function: then the cache is its own.
        miss,
        info.static_argnums,
        info.static_argnames,
        pxla.JitGlobalCppCacheKeys(),
        tree_util.dispatch_registry,
        pxla.cc_shard_arg,
    )


def recorded_arguments(signature: Signature, shardings: Sequence[str]) -> tuple[Argument, ...]:
    """The leaves of a recorded call, to compare others with; a sharding's text is "" for none."""
    return tuple(
        _argument(spec, spec.name, sharding_of(sharding) if sharding else None)
        for spec, sharding in zip(signature.inputs, shardings, strict=True)
    )


def options_of(jitted: Any) -> Mapping[str, Any]:
    """What `jax.jit` was told, for a key: donation, shardings and so on."""
    info = jitted._jit_info
    return {
        "static": [list(info.static_argnums), list(info.static_argnames)],
        "donated": [list(info.donate_argnums), list(info.donate_argnames)],
        "in_shardings": [sharding_text(leaf) for leaf in info.in_shardings_leaves],
        "out_shardings": [sharding_text(leaf) for leaf in info.out_shardings_leaves],
        "layouts": [str(x) for x in (*info.in_layouts_leaves, *info.out_layouts_leaves) if x],
        "keep_unused": bool(info.keep_unused),
        "compiler_options": [[name, repr(value)] for name, value in info.compiler_options_kvs],
    }


def _run(compiled: Any, leaves: list[Any]) -> tuple[Any, Any, bool]:
    """The results, and what C++ needs to make the next such call itself."""
    executable = compiled._executable
    flat = executable.call(*leaves)
    outs = tree_util.tree_unflatten(compiled.out_tree, flat)
    reflattened, tree = pxla.reflatten_outputs_for_dispatch(compiled.out_tree, flat)
    if not all(isinstance(out, _jax.ArrayImpl) for out in reflattened):
        return outs, None, False
    data = pxla.MeshExecutableFastpathData(
        executable.xla_executable,
        tree,
        executable._in_shardings,
        executable._out_shardings,
        [out.aval for out in reflattened],
        [out._committed for out in reflattened],
        [i in executable._kept_var_idx for i in range(len(leaves))],
        executable._dispatch_in_layouts,
        [],
    )
    return outs, data, False
