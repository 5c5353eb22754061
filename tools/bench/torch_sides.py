"""The sides of `torch_programs.py`, in fresh processes: `torch_sides.py SIDE FOLDER START [STEPS]`.

FOLDER holds config, step and store, START is the clock when this process was started. Prints one
JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path[0] = sys.argv[2]  # where the step is

import numpy as np  # noqa: E402

_KEPT: list[Any] = []  # what a side made ready: a server keeps it, so taking it down is not timed


def ours(folder: Path) -> dict[str, float]:
    """`Runtime.open`. Serving a torch module from a store needs no torch."""
    import jax  # noqa: F401

    imported = time.monotonic()
    from aot_lora import Runtime

    runtime = Runtime.open(folder / "config.yaml")
    _KEPT.append(runtime)
    return {"imported": imported, "variants": len(runtime.plan.variants)}


def plain(folder: Path) -> dict[str, float]:
    """The peer: torchax traces each step, and JAX compiles it or finds it in its cache."""
    import jax
    import torchax  # noqa: F401

    imported = time.monotonic()
    counts = {"hits": 0, "misses": 0}

    def listen(event: str, **_: Any) -> None:
        name = event.removeprefix("/jax/compilation_cache/cache_")
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_listener(listen)
    for program in _programs(folder).values():
        _KEPT.append(jax.jit(program.fn).lower(*program.args).compile())
    return {"imported": imported, "variants": len(_KEPT), **counts}


cold = plain


def compare(folder: Path) -> dict[str, float]:
    """Not timed: calls every fifth variant through both sides."""
    import jax

    from aot_lora import load_config
    from aot_lora.runtime.load import load_all

    config = load_config(folder / "config.yaml")
    loaded = load_all(config, config.targets[0], tuple(jax.local_devices()[:1]))
    random, different = np.random.default_rng(0), 0

    def value(spec: Any) -> np.ndarray:
        if spec.dtype == np.int32:
            return np.zeros(spec.shape, spec.dtype)
        return random.standard_normal(spec.shape).astype(spec.dtype)

    for variant, program in list(_programs(folder).items())[::5]:
        args = jax.device_put(jax.tree.map(value, program.args))
        results = (loaded[variant].executable(*args), jax.jit(program.fn)(*args))
        different += not np.array_equal(*map(np.asarray, results))
    return {"different": different}


def steps(folder: Path, count: str) -> dict[str, float]:
    """Random lengths through the plan, then what no bucket holds, then the same without buckets."""
    import torch
    from torch_step import build

    from aot_lora.errors import RecompileError
    from aot_lora.interop.torch_xla.device import COMPILES
    from aot_lora.interop.torch_xla.steps import Steps

    served = Steps.open(folder / "config.yaml")
    plan, device = served.plan, served.device
    model = build().to(device.device)
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    banks = {
        module.name: tuple(
            served.put(np.zeros((module.layers, plan.bank_blocks, plan.quantum, width), "f4"))
            for width in (module.d, module.o)
        )
        for module in plan.modules
    }
    random = np.random.default_rng(0)
    lengths = random.integers(1, plan.tokens.buckets[-1] + 1, int(count))
    owned = {slot: tuple(range(1, 1 + 2**slot)) for slot in range(4)}  # 8, 16, 32 and 64 lanes
    times: list[float] = []
    for length in map(int, lengths):
        slot = int(random.integers(-1, 4))
        batch = served.batch(np.full(length, slot), owned)
        found = served.lookup("step", tokens=length, lanes=batch.lanes)
        args = [weights, served.rows(np.ones((length, 64), np.float32), found.tokens)]
        if batch.lanes:
            args += [banks, batch.blocks, batch.owners, batch.slots]
        began = time.perf_counter()
        found.executable(*args)
        times.append(time.perf_counter() - began)
    compiles = served.compiles
    bare: list[float] = []
    x = served.rows(np.ones((5, 64), np.float32), 8)
    for _ in range(200):
        began = time.perf_counter()
        with torch.no_grad():
            y = torch.func.functional_call(model, weights, (x,))
        device.sync([y])
        bare.append(time.perf_counter() - began)
    guarded: list[float] = []
    found = served.lookup("step", tokens=5)
    for _ in range(200):
        began = time.perf_counter()
        found.executable(weights, x)
        guarded.append(time.perf_counter() - began)
    control = False
    try:
        found.executable(weights, served.put(np.ones((5, 64), np.float32)))
    except RecompileError:  # refused before a compile
        control = served.compiles == compiles
    before = device.count(COMPILES)
    for length in map(int, lengths):
        with torch.no_grad():
            y = model(served.put(np.ones((length, 64), np.float32)))
        device.sync([y])
    unbucketed = device.count(COMPILES) - before
    return {
        "compiles": compiles,
        "control": control and unbucketed > 0,
        "unbucketed": unbucketed,
        "ours_us": statistics.median(guarded) * 1e6,
        "bare_us": statistics.median(bare) * 1e6,
    }


def _programs(folder: Path) -> dict[Any, Any]:
    from aot_lora import load_config
    from aot_lora.programs.catalog import Catalog

    config = load_config(folder / "config.yaml")
    catalog = Catalog(config.plan, config.targets[0], config=config.path)
    return {variant: catalog.program(variant) for variant in config.plan.variants}


SIDES = (ours, plain, compare, steps)


def main() -> None:
    """Runs a side and prints what it took."""
    name, folder, start, *more = sys.argv[1:]
    side = {**{function.__name__: function for function in SIDES}, "cold": cold}[name]
    found = side(Path(folder), *more)
    now = time.monotonic()
    imported = found.pop("imported", now)
    clock = {"from_import": now - imported, "from_start": now - float(start)}
    print(json.dumps({**found, **clock}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
