"""Fingerprints of a plan's graphs as torch_xla lowers them to StableHLO; nothing compiles."""

from __future__ import annotations

from aot_lora.config import Config
from aot_lora.errors import ProgramError
from aot_lora.interop.torch_xla.calls import Calls
from aot_lora.interop.torch_xla.device import Device
from aot_lora.interop.torch_xla.trace import StandIns, plain, trace
from aot_lora.lowering.fingerprint import fingerprint
from aot_lora.lowering.lock import TORCH_XLA, LockLine


def trace_all(config: Config) -> tuple[dict[str, dict[str, LockLine]], dict[str, ProgramError]]:
    """Traces the plan on the device that torch_xla has.

    Returns:
      target -> variant -> line, and the errors of those that cannot be traced, by
      ``target variant``.

    Raises:
      UnsupportedError: torch_xla cannot be imported here.
    """
    device = Device(config.store_root)
    calls = Calls(config.plan, config=config.path)
    target = TORCH_XLA + device.kind.lower()
    lines: dict[str, LockLine] = {}
    errors: dict[str, ProgramError] = {}
    for variant in config.plan.variants:
        # Stand-ins of its own: what it changed in place stays pending, and is dropped with them.
        try:
            traced = trace(variant, calls.call(variant), StandIns(device))
        except ProgramError as error:
            errors[f"{target} {variant.name}"] = error
            continue
        text = plain(device.stablehlo(traced.tensors))
        lines[variant.name] = LockLine(
            fingerprint=fingerprint(text, trees=traced.trees), signature=traced.signature
        )
    return {target: lines}, errors
