"""Where arrays lie, as text that another process can read back: shardings and meshes."""
# pyright: reportPrivateUsage=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import config as jax_config
from jax._src import core
from jax._src.sharding_impls import UnspecifiedValue
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jax.sharding import SingleDeviceSharding as OneDevice

from aot_lora._jax_compat import load_placed
from aot_lora.errors import ProgramError
from aot_lora.signature import Placement, Signature


def placement_of(compiled: Any, *, own_layouts: bool = False) -> Placement:
    """Where a `jax.stages.Compiled` runs.

    Args:
      compiled: any.
      own_layouts: whether its arguments may have layouts of their own, which others keep.

    Raises:
      ProgramError: a sharding or layout of it cannot be written down.
    """
    executable = compiled._executable
    layouts = [layout for layout in executable._dispatch_in_layouts if layout is not None]
    if layouts and not own_layouts:
        raise ProgramError(
            "an argument has a layout of its own",
            expected="JAX's default layouts",
            found=str(layouts[0]),
            next_step="leave the layout (jax.experimental.layout.Format) out",
        )
    table: dict[str, int] = {}

    def number(sharding: Any, aval: Any) -> int:
        return table.setdefault(sharding_text(sharding, rank=len(aval.shape)), len(table))

    inputs = tuple(map(number, executable._in_shardings, executable.in_avals))
    outputs = tuple(map(number, executable._out_shardings, executable.out_avals))
    unloaded = executable._unloaded_executable
    return Placement(
        devices=tuple(device.id for device in unloaded.device_list),
        shardings=tuple(table),
        inputs=inputs,
        outputs=outputs,
        committed=bool(unloaded.committed),
    )


def load_at(
    raw: bytes,
    signature: Signature,
    placement: Placement,
    devices: Sequence[Any] | None = None,
) -> Any:
    """Loads raw PJRT bytes where they are to run, as a `jax.stages.Compiled`.

    Bad bytes, or another number of devices, may abort the process: check them first.

    Args:
      raw: what `serialize` returned.
      signature: of the same program.
      placement: where it was compiled to run.
      devices: those to take instead, in the same order; this host's of the same ids unless given.
    """
    devices = _devices(placement.devices) if devices is None else devices
    present = dict(zip(placement.devices, devices, strict=True))
    shardings = [sharding_of(text, present) for text in placement.shardings]
    return load_placed(
        raw,
        signature,
        devices,
        in_shardings=[shardings[i] for i in placement.inputs],
        out_shardings=[shardings[i] for i in placement.outputs],
        committed=placement.committed,
    )


def sharding_text(sharding: Any, *, rank: int | None = None) -> str:
    """A sharding as JSON, the same in every process with the same devices; "" for none.

    Args:
      sharding: of an array, or None or JAX's "unspecified".
      rank: dimensions of its array, where known: shardings that mean the same read the same.

    Raises:
      ProgramError: it is of a kind that cannot be read back.
    """
    if sharding is None or isinstance(sharding, UnspecifiedValue):
        return ""
    if isinstance(sharding, PartitionSpec):
        return json.dumps({"spec": _spec(sharding)})
    if not isinstance(sharding, Sharding):
        raise _unknown(sharding)
    devices = list(sharding._device_assignment)
    kind = sharding.memory_kind
    memory = None if kind is None or kind == _default_memory(devices[0]) else kind
    if len(devices) == 1 and rank is not None:
        return json.dumps({"device": devices[0].id, "memory": memory})
    if isinstance(sharding, OneDevice):
        return json.dumps({"device": devices[0].id, "memory": memory})
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise _unknown(sharding)
    value = {"mesh": mesh_fields(sharding.mesh), "spec": _spec(sharding.spec), "memory": memory}
    return json.dumps(value)


def _default_memory(device: Any) -> str:
    try:
        return device.default_memory().kind
    except jax.errors.JaxRuntimeError:  # GPUs of a topology do not say; GPUs say this.
        return "device"


def sharding_of(text: str, present: Mapping[int, Any] | None = None) -> Any:
    """The sharding that `sharding_text` wrote, over this host's devices or those of `present`."""
    value: dict[str, Any] = json.loads(text)
    if "device" in value:
        (device,) = _devices([value["device"]], present)
        return OneDevice(device, memory_kind=value["memory"])
    mesh = value["mesh"]
    devices = np.array(_devices(mesh["devices"], present), dtype=object).reshape(mesh["sizes"])
    types = tuple(AxisType[name] for name in mesh["types"])
    spec = PartitionSpec(*(tuple(p) if isinstance(p, list) else p for p in value["spec"]))
    made = Mesh(devices, tuple(mesh["axes"]), axis_types=types)
    return NamedSharding(made, spec, memory_kind=value["memory"])


def mesh_fields(mesh: Mesh) -> dict[str, Any]:
    """A mesh's axes, sizes, axis types and device ids."""
    return {
        "axes": list(mesh.axis_names),
        "sizes": list(mesh.devices.shape),
        "types": [kind.name for kind in mesh.axis_types],
        "devices": [device.id for device in mesh.devices.flat],
    }


def context_texts() -> Mapping[str, str]:
    """JAX's options and context managers that a trace depends on, by name.

    Raises:
      ProgramError: one has no text that another process would read the same.
    """
    # A list of the axes that transformations bind: none where a call is dispatched.
    found = dict(zip(jax_config.trace_context_names(), jax_config.trace_context(), strict=True))
    found.pop("axis_env_state", None)
    found["mesh"] = jax.sharding.get_mesh()
    texts: dict[str, str] = {}
    for name, value in found.items():
        meshes = value if isinstance(value, tuple) else (value,)
        if meshes and all(isinstance(mesh, Mesh) for mesh in meshes):
            texts[name] = json.dumps([mesh_fields(mesh) for mesh in meshes if not mesh.empty])
            continue
        texts[name] = repr(value)
        if " at 0x" in texts[name]:
            raise ProgramError(
                f"JAX's context `{name}` holds something that has no lasting name",
                found=texts[name],
                next_step="make the call outside of that context",
            )
    return texts


def is_traced(leaves: Sequence[Any]) -> bool:
    """Whether a call is part of a trace or transformation rather than one of its own."""
    return not core.trace_state_clean() or any(isinstance(x, core.Tracer) for x in leaves)


def _spec(spec: PartitionSpec) -> list[Any]:
    parts: list[Any] = [list(part) if isinstance(part, tuple) else part for part in spec]
    known = all(part is None or isinstance(part, str | list) for part in parts)
    if not known or getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        raise _unknown(spec)
    while parts and parts[-1] is None:
        parts.pop()
    return parts


def _devices(ids: Sequence[int], present: Mapping[int, Any] | None = None) -> list[Any]:
    if present is None:
        present = {device.id: device for device in jax.devices()}
    missing = [number for number in ids if number not in present]
    if missing:
        raise ProgramError(
            f"this host has no device {missing[0]}",
            expected=f"devices {list(ids)}",
            found=f"devices {sorted(present)}",
            next_step="run on as many devices as were recorded on",
        )
    return [present[number] for number in ids]


def _unknown(found: Any) -> ProgramError:
    return ProgramError(
        "a sharding cannot be written down",
        expected="a NamedSharding, PartitionSpec or SingleDeviceSharding",
        found=f"{type(found).__name__}: {found}"[:200],
        next_step="give the arguments, and the results by out_shardings, a NamedSharding",
    )
