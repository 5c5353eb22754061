"""Traces: a variant lowered to StableHLO, with its fingerprint and signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from aot_lora import _jax_compat
from aot_lora._jax_compat.constants import (
    Constant,
    constants_of,
    listed,
    refuse_constant_arguments,
)
from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.lowering.canonical import Canonical, canonical
from aot_lora.lowering.described import described
from aot_lora.lowering.fingerprint import fingerprint
from aot_lora.lowering.lock import LockLine
from aot_lora.plan import Variant
from aot_lora.programs.spec import Program
from aot_lora.signature import Signature

LARGE_CONSTANTS = 2**20
"""Bytes of constants in one executable from which on they are worth a warning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowering:
    """A traced and lowered call.

    Args:
      fingerprint: of what it does.
      signature: to call it by.
      lowered: what JAX compiles.
      code: what was fingerprinted, to read.
      stablehlo: as JAX prints it.
      constants: that are in it.
    """

    fingerprint: str
    signature: Signature
    lowered: Any
    code: Canonical
    stablehlo: str
    constants: tuple[Constant, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace(Lowering):
    """A lowered variant."""

    variant: Variant
    static: Mapping[str, Any]

    @property
    def line(self) -> LockLine:
        """What a lock holds of it."""
        return LockLine(
            fingerprint=self.fingerprint,
            signature=described(self.signature, self.stablehlo, static=self.static),
            kernels=self.code.kernels,
        )

    @property
    def warning(self) -> str:
        """What to tell of constants of more than `LARGE_CONSTANTS` bytes; empty for fewer."""
        if sum(one.bytes for one in self.constants) <= LARGE_CONSTANTS:
            return ""
        return (
            f"{self.variant.name} holds constants: {listed(self.constants)}; "
            "each executable and each load of it has them again: pass them as arguments"
        )


def prepare_tracing() -> None:
    """Keeps source paths and line numbers out of what is traced, for this process."""
    jax.config.update("jax_traceback_in_locations_limit", 0)


def trace(
    variant: Variant,
    program: Program,
    *,
    platform: str,
    devices: int = 1,
    device: Any | None = None,
) -> Trace:
    """Traces and lowers a program.

    Args:
      variant: for names in errors.
      program: what to trace.
      platform: ``cpu``, ``cuda`` or ``tpu``; need not be present.
      devices: of the mesh.
      device: the device to compile for, where it is one and not JAX's default one.

    Raises:
      ProgramError: the function cannot be traced, or on a mesh an argument has no sharding.
    """
    args = program.args
    _check(program, variant, devices)
    if device is not None:
        sharding = SingleDeviceSharding(device)
        args = jax.tree.map(
            lambda a: (
                jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding, weak_type=a.weak_type)
                if isinstance(a, jax.ShapeDtypeStruct)
                else a  # A Python scalar or an array has no device of its own.
            ),
            args,
        )
    out: dict[str, Any] = {}
    if program.out_shardings is not None:
        out["out_shardings"] = program.out_shardings
    if program.auto_layouts:
        out["in_shardings"] = tuple(
            jax.tree.map(lambda _: Format(Layout.AUTO), arg) if i in program.auto_layouts else None
            for i, arg in enumerate(args)
        )
    static = program.static

    def traced() -> Any:
        names = tuple(static)
        jitted = jax.jit(program.fn, donate_argnums=program.donate, static_argnames=names, **out)
        return jitted.trace(*args, **static)

    found = lower(
        traced,
        platform=platform,
        where=variant.name,
    )
    return Trace(
        variant=variant,
        fingerprint=found.fingerprint,
        signature=_named(found.signature, program),
        lowered=found.lowered,
        code=found.code,
        stablehlo=found.stablehlo,
        constants=found.constants,
        static=static,
    )


def require_repeatable(first: Trace, second: Trace) -> None:
    """Refuses a user's program that is another one when its function is called again.

    Raises:
      ProgramError: it is; says whether the arguments differ or the code.
    """
    if (first.fingerprint, first.signature) == (second.fingerprint, second.signature):
        return
    signatures = [str(one.signature) for one in (first, second)]
    code = signatures[0] == signatures[1]
    raise ProgramError(
        "the program changes from one call of its function to the next",
        where=first.variant.name,
        expected="the same program for the same point: what is stored must be what is served",
        found="other code, or other constants"
        if code
        else f"{signatures[0]}, then {signatures[1]}",
        next_step="take time, randomness, counters and the order of sets out of it",
    )


def _check(program: Program, variant: Variant, devices: int) -> None:
    if program.names and len(program.names) != len(program.args):
        raise ProgramError(
            "not one name for each argument",
            where=variant.name,
            expected=f"{len(program.args)} names",
            found=f"{len(program.names)}: {', '.join(program.names)}",
        )
    if devices == 1:
        return
    for path, leaf in jax.tree_util.tree_flatten_with_path(program.args)[0]:
        if getattr(leaf, "sharding", None) is None:
            raise ProgramError(
                "on a mesh an argument needs a sharding",
                where=variant.name,
                expected="context.array(..., spec=...), or context.sharding(spec)",
                found=f"argument {jax.tree_util.keystr(path)}: {leaf}",
                next_step="say how the mesh divides it; PartitionSpec() is whole on each device",
            )


def _named(signature: Signature, program: Program) -> Signature:
    """The signature with the program's own names for its arguments."""
    if not program.names:
        return signature
    leaves = jax.tree_util.tree_flatten_with_path(program.args)[0]
    names = (program.names[path[0].idx] + jax.tree_util.keystr(path[1:]) for path, _ in leaves)
    inputs = zip(signature.inputs, names, strict=True)
    return replace(signature, inputs=tuple(replace(spec, name=name) for spec, name in inputs))


def lower(
    trace: Callable[[], Any], *, platform: str, where: str, own_nodes: bool = False
) -> Lowering:
    """Traces and lowers one call of what `jax.jit` returned.

    Args:
      trace: calls its `trace`, and returns what that did.
      platform: ``cpu``, ``cuda`` or ``tpu``; need not be present.
      where: for errors.
      own_nodes: whether named tuples and registered classes may be among the arguments.

    Raises:
      ProgramError: it cannot be traced, or no stored executable could do what it does.
    """
    try:
        traced = trace()
        _jax_compat.refuse_callbacks(traced)
        lowered = traced.lower(lowering_platforms=(platform,))
        constants = constants_of(traced)
        refuse_constant_arguments(lowered, constants)
        signature = _jax_compat.signature_of(traced, lowered, own_nodes=own_nodes)
    except AotLoraError as error:
        error.where = error.where or where
        raise type(error)(error.problem, **error.fields()) from error
    except Exception as error:
        raise ProgramError(
            f"cannot be traced: {type(error).__name__}: {str(error).strip()[:1000]}",
            where=where,
            next_step="mend the program; --debug shows where it raised",
        ) from error
    stablehlo = lowered.as_text()
    code = canonical(stablehlo)
    return Lowering(
        fingerprint=fingerprint(code, trees=(signature.in_tree, signature.out_tree)),
        signature=signature,
        lowered=lowered,
        code=code,
        stablehlo=stablehlo,
        constants=constants,
    )
