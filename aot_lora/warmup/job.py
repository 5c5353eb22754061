"""What a worker process does: one variant from program to artifact."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from aot_lora.config import Config
from aot_lora.plan import LORA_PROGRAMS, TargetSpec, Variant
from aot_lora.signature import Signature
from aot_lora.store import Entry, LocalStore
from aot_lora.store.keep import keep
from aot_lora.targets.environment import recording_environment, worker_environment
from aot_lora.warmup.compile import compile_lowered, compile_tuned

if TYPE_CHECKING:
    from aot_lora.lowering.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a worker needs to know once.

    Args:
      config: the config.
      target: what to compile for.
      parts: the target's identity by named part.
      record: a folder for what the GPU's autotuner finds, a file of each process; or None.
    """

    config: Config
    target: TargetSpec
    parts: dict[str, str]
    record: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """What became of a variant.

    Args:
      entry: its artifact.
      compiled: whether it had to be.
      seconds: the worker's time for it.
      set_aside: where a damaged artifact of its key went, or empty.
      warning: what to tell of it, or empty.
      unrecorded: whether it has matmuls that the recorded autotuning results lack.
    """

    entry: Entry
    compiled: bool
    seconds: float
    set_aside: str
    warning: str = ""
    unrecorded: bool = False


class Worker:
    """The state of a worker process: JAX is imported, the target is open."""

    def __init__(self, job: Job) -> None:
        from aot_lora.lowering.trace import prepare_tracing
        from aot_lora.programs.catalog import Catalog
        from aot_lora.targets.devices import compile_devices

        prepare_tracing()
        self.job = job
        self.store = LocalStore(job.config.store_root)
        self.devices = compile_devices(job.target)
        self.catalog = Catalog(
            job.config.plan, job.target, config=job.config.path, devices=self.devices
        )

    def trace(self, variant: Variant) -> Trace:
        """Traces a variant for the target.

        Raises:
          ProgramError: it cannot be traced.
        """
        from aot_lora.lowering.trace import trace
        from aot_lora.targets.cuda import without_gpu

        target = self.job.target
        one = target.deviceless and target.devices == 1
        with without_gpu(target):
            return trace(
                variant,
                self.catalog.program(variant),
                platform=target.platform,
                devices=target.devices,
                device=self.devices[0] if one else None,
            )


_job: Job | None = None


def start(job: Job) -> None:
    """Readies this process for `build`: the environment stands before JAX is imported."""
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle.
    os.environ.update(
        recording_environment(job.target, job.record / f"{os.getpid()}.textproto")
        if job.record
        else worker_environment(job.target, autotune=job.config.autotune_path)
    )
    _job = job


@cache
def this_worker() -> Worker:
    """The worker that this process is, opened at its first variant."""
    # Not in `start`: an error there would break the pool instead of reaching the caller.
    assert _job is not None, "start() first"
    return Worker(_job)


def build(variant: Variant) -> Built:
    """Traces a variant and, unless its artifact is stored already, compiles and stores it.

    Raises:
      ProgramError: it cannot be traced, compiled or serialized.
      StoreError: it cannot be written.
    """
    from aot_lora import _jax_compat
    from aot_lora._jax_compat.layouts import layouts_of
    from aot_lora._jax_compat.placement import placement_of
    from aot_lora.lowering.trace import require_repeatable

    worker = this_worker()
    target = worker.job.target
    began = time.perf_counter()
    found = worker.trace(variant)
    parts = {
        "fingerprint": found.fingerprint,
        "signature": f"{found.signature} kept {found.signature.kept}",
        **worker.job.parts,
    }

    recorded = True

    def compile_raw() -> tuple[bytes, Signature]:
        if variant.program not in LORA_PROGRAMS:
            require_repeatable(found, worker.trace(variant))
        nonlocal recorded
        if target.autotune:
            compiled, recorded = compile_tuned(variant, found.lowered)
        else:
            compiled = compile_lowered(variant, found.lowered)
        signature = replace(found.signature, layouts=layouts_of(compiled))
        if target.devices > 1:
            signature = replace(signature, placement=placement_of(compiled, own_layouts=True))
        return _jax_compat.serialize(compiled), signature

    kept = keep(worker.store, variant.name, parts, compile_raw)
    seconds = round(time.perf_counter() - began, 3)
    return Built(
        entry=replace(kept.entry, seconds=seconds) if kept.compiled else kept.entry,
        compiled=kept.compiled,
        seconds=seconds,
        set_aside=str(kept.set_aside or ""),
        warning=found.warning,
        unrecorded=not recorded,
    )
