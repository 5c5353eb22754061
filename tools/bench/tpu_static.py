"""What the TPU compiler thinks a program costs: a static profile, taken where no TPU is.

The compiler writes `estimated_cycles` beside every operation, Pallas kernels included. Its cycles
know no HBM bandwidth to speak of, so a cost is max(cycles / clock, bytes / bandwidth), the bytes
being those that the program cannot avoid. It ranks kernels and finds regressions; it is no time,
and it is unvalidated against hardware. It takes scalars as 0: what walks as far as a scalar says
is costed through a twin that walks a fixed number of steps.

The profile may end the process and changes executables, so it is taken in a child.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from lines import note

from aot_lora.plan import TargetSpec
from aot_lora.targets.environment import worker_environment


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A chip's published speeds.

    Args:
      clock_hz: of the matrix units. Peak bf16 FLOP/s over (2 x matrix units x their cells).
      flop_per_s: peak of bf16.
      hbm_bytes_per_s: bandwidth of its memory.
    """

    clock_hz: float
    flop_per_s: float
    hbm_bytes_per_s: float


CHIPS = {
    # https://cloud.google.com/tpu/docs/v6e: 918 TFLOP/s, 1640 GB/s; 4 x 256 x 256 cells.
    "v6e": Chip(clock_hz=1.75e9, flop_per_s=918e12, hbm_bytes_per_s=1640e9),
    # https://cloud.google.com/tpu/docs/v5e: 197 TFLOP/s, 819 GB/s; 4 x 128 x 128 cells.
    "v5e": Chip(clock_hz=1.5e9, flop_per_s=197e12, hbm_bytes_per_s=819e9),
    # https://cloud.google.com/tpu/docs/v5p: 459 TFLOP/s, 2765 GB/s; 8 x 128 x 128 cells.
    "v5p": Chip(clock_hz=1.75e9, flop_per_s=459e12, hbm_bytes_per_s=2765e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A program to cost.

    Args:
      entry: ``module:function``; called with a maker of abstract arrays, (*shape, dtype=), and
        the options. Returns (function, arguments, numbers of donated arguments).
      options: JSON.
      hbm_bytes: what the program must read and write.
      free_layouts: whether the compiler may choose the layouts of arguments and results, as it
        may inside a step. Without, plain XLA pays for copies at the borders of a lone function.
    """

    entry: str
    options: dict[str, Any] = field(default_factory=dict)
    hbm_bytes: int = 0
    free_layouts: bool = False


class Cost(NamedTuple):
    """us: the cost; cycles: of all operations. An error leaves NaN."""

    us: float
    cycles: float
    error: str = ""


def costs_by_two(topology: str, jobs: Sequence[Job], *, limit_s: float = 120) -> list[Cost]:
    """`costs`, in two processes at a time."""

    def half(start: int) -> list[Cost]:
        return list(costs(topology, jobs[start::2], limit_s=limit_s))

    with ThreadPoolExecutor(2) as pool:
        even, odd = pool.map(half, (0, 1))
    found = [Cost(0, 0)] * len(jobs)
    found[0::2], found[1::2] = even, odd
    return found


def costs(topology: str, jobs: Iterable[Job], *, limit_s: float = 120) -> Iterator[Cost]:
    """Costs programs, in order, in child processes.

    Args:
      topology: for instance ``v6e:1x1``.
      jobs: what to cost.
      limit_s: for one program. One that takes longer, or ends the child, has an error.
    """
    chip = CHIPS[topology.partition(":")[0]]
    waiting = list(jobs)
    with tempfile.TemporaryDirectory() as folder:
        while waiting:
            with _child(topology, waiting, folder) as child:
                for found in _answers(child, limit_s):
                    job = waiting.pop(0)
                    if len(waiting) % 50 == 0:
                        note(f"{len(waiting)} to go")
                    yield _cost(job, chip, found)
                if waiting and child.wait():
                    waiting.pop(0)
                    yield Cost(float("nan"), float("nan"), f"no answer within {limit_s} s")


def _cost(job: Job, chip: Chip, found: dict[str, Any]) -> Cost:
    if "error" in found:
        return Cost(float("nan"), float("nan"), found["error"])
    cycles = found["cycles"]
    seconds = max(cycles / chip.clock_hz, job.hbm_bytes / chip.hbm_bytes_per_s)
    return Cost(seconds * 1e6, cycles)


def _child(topology: str, jobs: list[Job], folder: str) -> subprocess.Popen[str]:
    target = TargetSpec(platform="tpu", topology=topology)
    root = str(Path(__file__).resolve().parents[2])
    environment = {
        **os.environ,
        **worker_environment(target),
        "LIBTPU_INIT_ARGS": f"--xla_jf_dump_static_llo_profile_to={folder}",
        "PYTHONPATH": os.pathsep.join([root, str(Path(__file__).parent)]),
    }
    work = json.dumps([topology, [[job.entry, job.options, job.free_layouts] for job in jobs]])
    child = subprocess.Popen(
        [sys.executable, __file__],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert child.stdin
    child.stdin.write(work)
    child.stdin.close()
    return child


def _answers(child: subprocess.Popen[str], limit_s: float) -> Iterator[dict[str, Any]]:
    """What the child says, until it ends or is ended for taking too long."""
    assert child.stdout
    while True:
        timer = threading.Timer(limit_s, child.kill)
        timer.start()
        line = child.stdout.readline()
        timer.cancel()
        if not line.endswith("\n"):
            return
        yield json.loads(line)


# --- In the child --------------------------------------------------------------------------------

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERATION = re.compile(r"^ +(?:ROOT )?%([\w.\-]+) = (.*?) ([\w\-]+)\((.*?)\)")


def estimated_cycles(text: str) -> int:
    """The sum over a compiled program's operations, each loop's body once.

    What depends on integers alone is left out: lists and masks are made once for a batch, and
    serve all modules and layers.
    """
    total, fused, of_data = 0, False, set[str]()
    for line in text.splitlines():
        if line and not line.startswith((" ", "}")):
            fused = line.startswith("%fused")
        operation = _OPERATION.match(line)
        if fused or not operation:
            continue
        name, kind, opcode, operands = operation.groups()
        own = "bf16" in kind and opcode == "parameter"
        if own or of_data.intersection(re.findall(r"%([\w.\-]+)", operands)):
            of_data.add(name)
            cycles = _CYCLES.search(line)
            total += int(cycles.group(1)) if cycles else 0
    return total


def _serve() -> None:
    topology, jobs = json.load(sys.stdin)
    import jax
    import jax.numpy as jnp
    from jax.experimental.layout import Format, Layout

    from aot_lora.targets.devices import compile_devices

    device = compile_devices(TargetSpec(platform="tpu", topology=topology))[0]
    sharding = jax.sharding.SingleDeviceSharding(device)

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    free = Format(Layout.AUTO, sharding)
    for entry, options, free_layouts in jobs:
        module, _, name = entry.partition(":")
        try:
            fn, args, donated = getattr(importlib.import_module(module), name)(array, **options)
            layouts = {"in_shardings": free, "out_shardings": free} if free_layouts else {}
            donated = () if free_layouts else donated  # Not of one accord in jax 0.10.2.
            traced = jax.jit(fn, donate_argnums=donated, **layouts).trace(*args)
            compiled = traced.lower(lowering_platforms=("tpu",)).compile()
            answer = {"cycles": estimated_cycles(compiled.as_text())}
        except Exception as error:  # Whatever the compiler refuses, the others are still costed.
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
        jax.clear_caches()  # Hundreds of executables are gigabytes.


if __name__ == "__main__":
    _serve()
