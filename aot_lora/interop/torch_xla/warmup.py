"""Runs every variant of a plan once, so that torch_xla has each in its cache."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from aot_lora.config import Config
from aot_lora.errors import AotLoraError, ProgramError, UnsupportedError
from aot_lora.interop.torch_xla.calls import Calls
from aot_lora.interop.torch_xla.device import CACHE, MISSES, UNLOADABLE, Device
from aot_lora.interop.torch_xla.trace import Spec, StandIns, trace
from aot_lora.plan import Variant
from aot_lora.warmup import Report, total

# XLA:CPU's words, in some releases and shapes, for a product of bfloat16 that is to be float32.
_NO_SUCH_PRODUCT = re.compile(r"DotThunk|Unsupported element type")


@dataclass(frozen=True, slots=True, kw_only=True)
class Warmed:
    """A variant that torch_xla has compiled.

    Args:
      variant: the variant.
      graph: torch_xla's hash of what it does.
      specs: of its arguments' leaves.
      signature: the same, and its results, for people.
      fn: what to call.
    """

    variant: Variant
    graph: bytes
    specs: tuple[Spec, ...]
    signature: str
    fn: Callable[..., object]


def warm_store(config: Config, *, say: Callable[[str], None]) -> Report:
    """`aot-lora warmup --backend torch_xla`: fills the cache in the store.

    A TPU that this host lacks is compiled for all the same, to see whether it would.

    Raises:
      UnsupportedError: torch_xla cannot be imported here, or has no such device.
    """
    device = Device(config.store_root)
    reports: list[Report] = []
    count = len(config.plan.variants)
    for target in config.targets:
        if target.platform == device.kind.lower():
            say(f"torch_xla {device.kind}: {count} variants; running each once")
            reports.append(warm(config, device, done=lambda _, e: e and say(f"failed: {e}"))[1])
            if device.count(UNLOADABLE):
                say(f"a {device.kind} cannot load what is on disk: each process compiles it again")
        elif target.platform == "tpu":
            from aot_lora.interop.torch_xla.deviceless import compile_all

            say(f"{target}: {count} graphs of torch_xla; compiling without a TPU")
            reports.append(compile_all(config, device, target, say=say))
        else:
            require_device(config, device)
    return total(reports)


def require_device(config: Config, device: Device) -> None:
    """Refuses a config that is for other devices than torch_xla has.

    Raises:
      UnsupportedError: it is.
    """
    if device.kind.lower() not in {target.platform for target in config.targets}:
        raise UnsupportedError(
            f"torch_xla's device is a {device.kind}",
            where=f"{config.path}: target",
            expected=", ".join(map(str, config.targets)),
            next_step="run it where that device is, set PJRT_DEVICE, or add the platform to target",
        )


def warm(
    config: Config,
    device: Device,
    *,
    done: Callable[[Variant, AotLoraError | None], object] = lambda *_: None,
) -> tuple[dict[Variant, Warmed], Report]:
    """Runs every variant once, on zeros.

    Args:
      config: from `load_config`.
      device: torch_xla's; its cache is the store's.
      done: told of each variant, with its error if it has one.

    Returns:
      What is warm, and the report. Its ``compiled`` counts the graphs whose key was not on disk;
      a CPU compiles the others again, for it cannot load what it wrote.
    """
    began = time.perf_counter()
    misses_before = device.count(MISSES)
    calls, stand_ins = Calls(config.plan, config=config.path), StandIns(device)
    warmed: dict[Variant, Warmed] = {}
    failed: list[AotLoraError] = []
    for variant in config.plan.variants:
        error = None
        try:
            warmed[variant] = _one(variant, calls, stand_ins, device)
        except ProgramError as refused:
            error = refused
            failed.append(refused)
        done(variant, error)
    new = device.count(MISSES) - misses_before
    files = (config.store_root / CACHE).iterdir()
    report = Report(
        points=config.plan.points,
        variants=len(config.plan.variants),
        traced=len(config.plan.variants),
        compiled=new,
        reused=len(warmed) - new,
        failed=tuple(failed),
        seconds=round(time.perf_counter() - began, 3),
        bytes=sum(file.stat().st_size for file in files),
    )
    return warmed, report


def _one(variant: Variant, calls: Calls, stand_ins: StandIns, device: Device) -> Warmed:
    call = calls.call(variant)
    traced = trace(variant, call, stand_ins)
    graph = device.graph_hash(traced.tensors)
    try:
        device.sync(traced.tensors, wait=True)
    except Exception as error:
        raise _refused(variant, error) from error
    return Warmed(
        variant=variant,
        graph=graph,
        specs=traced.specs,
        signature=traced.signature,
        fn=call.fn,
    )


def _refused(variant: Variant, error: Exception) -> ProgramError:
    text = str(error).strip()
    if _NO_SUCH_PRODUCT.search(text):
        return ProgramError(
            "a product of bfloat16 with a float32 result, which the CPU runtime lacks",
            where=variant.name,
            found=text.splitlines()[0][:200],
            next_step="widen both factors first, as aot_lora.interop.torch_xla.kernels do: "
            "x.float() @ w.float(); on a TPU that costs nothing",
        )
    return ProgramError(
        f"the compiler refused it: {type(error).__name__}: {text[:1000]}",
        where=variant.name,
        next_step="make the point smaller (tokens, lanes), or mend the program",
    )
