"""torch_xla's graphs through the real TPU compiler, on a host without a TPU.

Says whether they compile, how large they are and how much memory they take. That an executable made
so loads in torch_xla was never shown, so each artifact says that it is not for it. torch_xla lowers
here for the CPU that it has; what it would lower otherwise on a TPU is not seen.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

from aot_lora._jax_compat.stablehlo import Compiled, compile_stablehlo
from aot_lora.config import Config
from aot_lora.errors import AotLoraError, ProgramError
from aot_lora.interop.torch_xla.calls import Calls
from aot_lora.interop.torch_xla.device import Device
from aot_lora.interop.torch_xla.trace import StandIns, Traced, plain, trace
from aot_lora.interop.versions import TORCH_XLA
from aot_lora.lowering.fingerprint import fingerprint
from aot_lora.plan import TargetSpec, Variant
from aot_lora.signature import ArraySpec, Signature
from aot_lora.store.keep import Kept, keep
from aot_lora.store.local import LocalStore
from aot_lora.targets.devices import compile_devices
from aot_lora.targets.environment import worker_environment
from aot_lora.targets.identity import identity
from aot_lora.warmup import Report

MARK = "not loadable by torch_xla"


def compile_all(
    config: Config, device: Device, target: TargetSpec, *, say: Callable[[str], None]
) -> Report:
    """Compiles every variant's graph for a TPU topology and stores it, marked.

    Raises:
      UnsupportedError: the installed libtpu does not know the topology, or there is none.
    """
    began = time.perf_counter()
    for name, value in worker_environment(target).items():
        os.environ.setdefault(name, value)
    parts, (chip, *_) = identity(target), compile_devices(target)
    store, calls = LocalStore(config.store_root), Calls(config.plan, config=config.path)
    kept: list[Kept] = []
    failed: list[AotLoraError] = []
    largest, of = 0, ""
    with store.writing():
        for variant in config.plan.variants:
            try:
                # Stand-ins of its own: what it changed in place stays pending.
                traced = trace(variant, calls.call(variant), StandIns(device))
                one, memory = _one(variant, traced, device, chip, store, parts)
            except ProgramError as error:
                failed.append(error)
                say(f"failed: {error}")
                continue
            kept.append(one)
            if memory and memory.total_bytes > largest:
                largest, of = memory.total_bytes, variant.name
    if of:
        say(f"{target}: {largest} bytes of device memory at most, for {of}; {MARK}")
    return Report(
        points=config.plan.points,
        variants=len(config.plan.variants),
        traced=len(config.plan.variants),
        compiled=sum(one.compiled for one in kept),
        reused=sum(not one.compiled for one in kept),
        failed=tuple(failed),
        seconds=round(time.perf_counter() - began, 3),
        bytes=sum(size for _, size in {(one.entry.key, one.entry.bytes) for one in kept}),
    )


def _one(
    variant: Variant,
    traced: Traced,
    device: Device,
    chip: Any,
    store: LocalStore,
    parts: dict[str, str],
) -> tuple[Kept, Compiled | None]:
    text = plain(device.stablehlo(traced.tensors))
    signature = _signature(variant, traced, device)
    made: list[Compiled] = []

    def compile_raw() -> tuple[bytes, Signature]:
        try:
            made.append(compile_stablehlo(text, chip))
        except Exception as error:
            raise ProgramError(
                f"the compiler refused it: {type(error).__name__}: {str(error).strip()[:1000]}",
                where=variant.name,
                next_step="make the point smaller (tokens, lanes), or mend the program",
            ) from error
        return made[0].raw, signature

    key = {
        "fingerprint": fingerprint(text, trees=traced.trees),
        "signature": f"{signature} kept {signature.kept}",
        "made by": f"torch_xla {TORCH_XLA}: {MARK}",
        **parts,
    }
    return keep(store, variant.name, key, compile_raw), (made or [None])[0]


def _signature(variant: Variant, traced: Traced, device: Device) -> Signature:
    """`kept` is the order in which the executable takes arguments, which is not that of the call.

    What it takes beside them, numbers that torch_xla made parameters of, follows as ``constant``.
    """
    inputs, kept = list(traced.inputs), list[int]()
    for number, tensor in device.parameters(traced.tensors):
        if number in traced.numbers:
            kept.append(traced.numbers.index(number))
            continue
        kept.append(len(inputs))
        inputs.append(
            ArraySpec(
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                name="constant",
            )
        )
    return Signature(
        function=variant.program,
        inputs=tuple(inputs),
        outputs=traced.outputs,
        donated=(),
        kept=tuple(kept),
        in_tree=traced.trees[0],
        out_tree=traced.trees[1],
    )
