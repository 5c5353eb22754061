"""What a call through the runtime costs above the bare executable, in one process.

    python tools/bench/lookup.py

Goal: `Runtime.lookup` plus the call at most 2 us above the call alone, bucket search included.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from configs import write_config
from lines import child_environment, emit, note

_PROGRAM = '''\
import jax

from aot_lora import Program

WIDTH = 64


def _step(x):
    return x + x


def step(point, context):
    """x [T, WIDTH] -> [T, WIDTH], so that its own time hides nothing."""
    return Program(fn=_step, args=(context.array(point.tokens, WIDTH),))
'''


def main() -> None:
    """Warms a config with a user program up, opens it, checks and times both parts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"  # before the first import of jax
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        runtime = _open(Path(name))
        _time_lookup(runtime, options.rounds, options.calls)
        _time_apply(runtime, options.rounds, options.calls // 4)


def _open(folder: Path) -> Any:
    (folder / "bench_step.py").write_text(_PROGRAM, encoding="utf-8")
    config = write_config(folder, variants=120, entry="bench_step:step")
    note("warming up")
    command = [sys.executable, "-m", "aot_lora", "warmup", str(config), "--store"]
    quiet = subprocess.DEVNULL
    environment = child_environment()
    store = str(folder / "store")
    subprocess.run([*command, store], check=True, env=environment, stdout=quiet, stderr=quiet)

    from aot_lora import Runtime

    return Runtime.open(config, store=store)


def _time_lookup(runtime: Any, rounds: int, calls: int) -> None:
    """Random token counts and slots; the bare side knows its executable beforehand."""
    import jax
    import numpy as np

    plan = runtime.plan
    dice = random.Random(0)
    batches = [
        (dice.randint(1, plan.tokens.buckets[-1]), dice.choice((1, 2))) for _ in range(calls)
    ]
    inputs = {
        tokens: jax.device_put(np.ones((tokens, 64), np.float32)) for tokens in plan.tokens.buckets
    }
    found = [runtime.lookup("step", tokens=tokens, slots=slots) for tokens, slots in batches]
    arrays = [inputs[one.tokens] for one in found]
    bare = [(one.executable, array) for one, array in zip(found, arrays, strict=True)]
    ours = [(tokens, slots, array) for (tokens, slots), array in zip(batches, arrays, strict=True)]

    def call_bare() -> Any:
        for executable, array in bare:
            out = executable(array)
        return out

    def call_ours() -> Any:
        lookup = runtime.lookup
        for tokens, slots, array in ours:
            out = lookup("step", tokens=tokens, slots=slots).executable(array)
        return out

    if not np.array_equal(call_bare(), call_ours()):
        raise SystemExit("the results differ")
    _report("lookup/cpu", "lookup and call", "call", call_ours, call_bare, rounds, calls)

    def only_look_up() -> None:
        lookup = runtime.lookup
        for tokens, slots, _ in ours:
            lookup("step", tokens=tokens, slots=slots)

    # A call returns before the device is done, so waiting for it can hide a lookup: the lookups
    # alone are what they cost at most.
    alone = statistics.median(_us(only_look_up, calls) for _ in range(rounds))
    emit(case="lookup/cpu", metric="lookup alone, bucket search included", value=alone, unit="us")


def _time_apply(runtime: Any, rounds: int, calls: int) -> None:
    """One module's `apply` on device arrays, against its shrink and expand called bare."""
    import jax
    import numpy as np

    from aot_lora.adapters import pack_arrays

    plan = runtime.plan
    module = plan.modules[0]
    random_ = np.random.default_rng(0)
    a, b = (
        random_.standard_normal((16, width)).astype(np.float32) for width in (module.d, module.o)
    )
    for slot in (0, 1):
        runtime.banks.put(slot, pack_arrays({(module.name, 0): (a, b.T)}, plan))
    batch = runtime.batch(np.arange(16) % 2)
    x = jax.device_put(random_.standard_normal((batch.tokens, module.d)).astype(np.float32))
    a_bank, b_bank = runtime.banks.arrays[module.name]
    _, shrink, expand = batch.kernels[module.name]
    layer = jax.device_put(np.int32(0))
    zero = np.zeros((batch.tokens, module.o), np.float32)

    def call_bare() -> Any:
        y = jax.device_put(zero)
        for _ in range(calls):  # the base is donated: each result is the next base
            h = shrink(x, a_bank, layer, batch.blocks, batch.owners, batch.slots)
            y = expand(y, h, b_bank, layer, batch.blocks, batch.slots)
        return y

    def call_ours() -> Any:
        y = jax.device_put(zero)
        for _ in range(calls):
            y = runtime.apply(module.name, x, batch, y).array
        return y

    if not np.array_equal(call_bare(), call_ours()):
        raise SystemExit("the results differ")
    _report("apply/cpu", "apply", "its two kernels called", call_ours, call_bare, rounds, calls)


def _report(
    case: str,
    metric: str,
    peer: str,
    ours: Callable[[], Any],
    bare: Callable[[], Any],
    rounds: int,
    calls: int,
) -> None:
    """Times both in turns; medians over the rounds, the overhead over pairs of neighbours."""
    pairs = [(_us(ours, calls), _us(bare, calls)) for _ in range(rounds)]
    emit(
        case=case,
        metric=metric,
        value=statistics.median(pair[0] for pair in pairs),
        unit="us",
        peer=f"{peer}, bare",
        peer_value=statistics.median(pair[1] for pair in pairs),
    )
    overhead = statistics.median(one - other for one, other in pairs)
    emit(case=case, metric=f"{metric}: above bare", value=overhead, unit="us")


def _us(calls_all: Callable[[], Any], calls: int) -> float:
    began = time.perf_counter()
    out = calls_all()
    took = time.perf_counter() - began
    if out is not None:
        out.block_until_ready()
    return took / calls * 1e6


if __name__ == "__main__":
    main()
