"""The sides of `warm_start.py`, each in a fresh process: `warm_start_sides.py SIDE FOLDER START`.

FOLDER holds what `warm_start.py` prepared, START is the clock when this process was started.
Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

IMPORTED = time.monotonic()

_EVENTS = "/jax/compilation_cache/cache_"
_KEPT: list[Any] = []  # what a side made ready: a server keeps it, so taking it down is not timed


def open_runtime(folder: Path) -> dict[str, float]:
    """Ours: everything that `Runtime.open` does, its imports included."""
    from aot_lora import Runtime

    began = time.monotonic()
    runtime = Runtime.open(folder / "config.yaml", store=str(folder / "store"))
    _KEPT.append(runtime)
    return {"open": time.monotonic() - began, "variants": len(runtime.plan.variants)}


def jax_compile(folder: Path) -> dict[str, float]:
    """The peer: `jax.jit(f).lower(...).compile()` with JAX's warm persistent cache."""
    hits = _count_hits()
    _KEPT.extend(_lower(program).compile() for program in _programs(folder))
    return {"variants": len(_KEPT), **hits}


def jax_call(folder: Path) -> dict[str, float]:
    """The peer as most servers warm up: each function called once; making inputs is not timed."""
    hits = _count_hits()
    programs = _programs(folder)
    spent = 0.0
    for program in programs:
        began = time.monotonic()
        function = _jit(program)
        arrays = jax.device_put([np.zeros(shape, dtype) for shape, dtype in program["args"]])
        spent += time.monotonic() - began
        jax.block_until_ready(function(*arrays))
        _KEPT.append(function)
    return {"variants": len(_KEPT), "spent": spent, **hits}


def bare(folder: Path, threads: int = len(os.sched_getaffinity(0))) -> dict[str, float]:
    """The floor: the same executables' bytes, uncompressed and unchecked, read and deserialised."""
    from jax._src.lib import xla_client

    device = jax.local_devices()[0]
    devices = xla_client.DeviceList((device,))

    def load(path: Path) -> Any:
        raw, options = path.read_bytes(), xla_client.CompileOptions()
        return device.client.deserialize_executable(raw, devices, options)

    began = time.monotonic()
    paths = sorted((folder / "raw").iterdir())
    if threads == 1:
        loaded = [load(path) for path in paths]
    else:
        with ThreadPoolExecutor(threads) as pool:
            loaded = list(pool.map(load, paths))
    _KEPT.append(loaded)
    return {"open": time.monotonic() - began, "variants": len(loaded)}


def bare_one_thread(folder: Path) -> dict[str, float]:
    """The floor without threads."""
    return bare(folder, threads=1)


def prepare(folder: Path) -> dict[str, float]:
    """Not timed: lists the programs, fills JAX's cache, writes the raw bytes."""
    from aot_lora import _jax_compat, load_config
    from aot_lora.programs.catalog import Catalog

    config = load_config(folder / "config.yaml", store=str(folder / "store"))
    catalog = Catalog(config.plan, config.targets[0], config=config.path)
    programs: list[dict[str, Any]] = []
    (folder / "raw").mkdir()
    for variant in config.plan.variants:
        built = catalog.program(variant)
        args = [(spec.shape, np.dtype(spec.dtype).name) for spec in built.args]
        programs.append(
            {
                "variant": variant.name,
                "function": built.fn.__name__,
                "args": args,
                "donate": built.donate,
            }
        )
        raw = _jax_compat.serialize(_lower(programs[-1]).compile())
        (folder / "raw" / variant.name.replace("/", "-")).write_bytes(raw)
    (folder / "programs.json").write_text(json.dumps(programs), encoding="utf-8")
    return {"variants": len(programs)}


def compare(folder: Path) -> dict[str, float]:
    """Not timed: calls every tenth variant through both sides and compares bit for bit."""
    from aot_lora import load_config
    from aot_lora.runtime.load import load_all

    config = load_config(folder / "config.yaml", store=str(folder / "store"))
    ours = load_all(config, config.targets[0], jax.local_devices()[0])
    random = np.random.default_rng(0)
    different = 0
    programs = _programs(folder)[::10]
    for program in programs:
        arrays = [
            random.integers(0, 2, shape).astype(dtype)
            if dtype == "int32"
            else random.standard_normal(shape).astype(dtype)
            for shape, dtype in program["args"]
        ]
        results = [
            jax.tree.leaves(function(*jax.device_put(arrays)))
            for function in (ours[program["variant"]], _lower(program).compile())
        ]
        same = [np.array_equal(a, b) for a, b in zip(*results, strict=True)]
        different += not all(same)
    return {"variants": len(programs), "different": different}


def _programs(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "programs.json").read_text(encoding="utf-8"))


def _jit(program: dict[str, Any]) -> Any:
    from aot_lora import kernels

    function = getattr(kernels, program["function"])
    return jax.jit(function, donate_argnums=tuple(program["donate"]))


def _lower(program: dict[str, Any]) -> Any:
    return _jit(program).lower(*(jax.ShapeDtypeStruct(s, d) for s, d in program["args"]))


def _count_hits() -> dict[str, float]:
    counts: dict[str, float] = {"hits": 0, "misses": 0}

    def listen(event: str, **_: Any) -> None:
        name = event.removeprefix(_EVENTS)
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_listener(listen)
    return counts


SIDES = (open_runtime, jax_compile, jax_call, bare, bare_one_thread, prepare, compare)


def main() -> None:
    """Runs a side and prints what it took."""
    name, folder, start = sys.argv[1:]
    side = {function.__name__: function for function in SIDES}[name]
    found = side(Path(folder))
    now = time.monotonic() - found.get("spent", 0.0)
    clock = {"from_import": now - IMPORTED, "from_start": now - float(start)}
    print(json.dumps({**found, **clock}), flush=True)
    os._exit(0)  # Taking thousands of executables down is nobody's start.


if __name__ == "__main__":
    main()
