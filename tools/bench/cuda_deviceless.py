"""What was compiled for a GPU without one, on that GPU, against the same compiled there.

    python tools/bench/cuda_deviceless.py compare CONFIG STORE [LABEL]
    python tools/bench/cuda_deviceless.py wrong

`compare` loads every variant of a config from a store as a server does, compiles it again on the
device, calls both with the same random arguments, and compares the results bit by bit. Where
recorded autotuning results lie beside the config, the device compiles with them too. `wrong` shows
that a server refuses another GPU than its target config's before it loads.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lines import ROOT, emit, note

_CALLS = 20


@dataclass(frozen=True, slots=True)
class Compared:
    """One executable: whether its results are the device's own, and what both took."""

    name: str
    differs: tuple[dict[str, Any], ...]
    compile_s: float
    ours_us: float | None
    device_us: float | None


def compare(config_path: str, store: str, label: str) -> None:
    """Prints, by program, how many executables give the very bits of the device's own."""
    import jax

    from aot_lora import load_config
    from aot_lora.runtime.load import load_all
    from aot_lora.targets.cuda import check_gpus
    from aot_lora.targets.devices import host_devices
    from aot_lora.targets.hbm import hbm_bytes
    from aot_lora.warmup.job import Job, Worker

    config = load_config(config_path, store=store)
    target = config.targets[0]
    devices = host_devices(target)
    case = f"cuda_deviceless/{devices[0].device_kind}/{label}"
    limit = (devices[0].memory_stats() or {}).get("bytes_limit", 0)
    emit(case=case, metric="memory that JAX takes", value=hbm_bytes(target), unit="bytes",
         peer="the device's bytes_limit", peer_value=limit)  # fmt: skip
    began = time.perf_counter()
    check_gpus(target, devices)
    emit(case=case, metric="check of the GPU", value=time.perf_counter() - began, unit="s")
    began = time.perf_counter()
    loaded = load_all(config, target, devices)
    load_s = time.perf_counter() - began
    alone = {id(one.executable): variant for variant, one in loaded.items()}
    at_hand = replace(target, topology="", target_config="", autotune="")
    worker = Worker(Job(config=config, target=at_hand, parts={}))
    options = {}
    if target.autotune:
        options["xla_gpu_load_autotune_results_from"] = str(config.autotune_path.absolute())
    found: dict[str, list[Compared]] = defaultdict(list)
    for variant in alone.values():
        one = _compare(config, worker, variant, loaded[variant].executable, options)
        found[variant.program].append(one)
        for difference in one.differs:
            print(json.dumps({"case": case, "variant": one.name, **difference}), flush=True)
    every = [one for group in found.values() for one in group]
    compile_s = sum(one.compile_s for one in every)
    emit(case=case, metric=f"load of {len(every)} executables", value=load_s, unit="s",
         peer="compile on the device, one after another", peer_value=compile_s)  # fmt: skip
    for program, group in found.items():
        same = sum(not one.differs for one in group)
        emit(case=f"{case}/{program}", metric=f"bit-equal of {len(group)}", value=same, unit="1")
        timed = [(o.ours_us, o.device_us) for o in group if o.ours_us and o.device_us]
        if timed:
            ours, peers = (sum(column) for column in zip(*timed, strict=True))
            emit(case=f"{case}/{program}", metric=f"one call of each of {len(timed)}", value=ours,
                 unit="us", peer="compiled on the device", peer_value=peers)  # fmt: skip
    jax.clear_caches()


def _compare(
    config: Any, worker: Any, variant: Any, ours: Any, options: dict[str, str]
) -> Compared:
    import jax
    import numpy as np

    from aot_lora.warmup.compile import compile_lowered

    lowered = worker.trace(variant).lowered
    began = time.perf_counter()
    device = compile_lowered(variant, lowered, options or None)
    compile_s = time.perf_counter() - began
    program = worker.catalog.program(variant)
    make = _Arrays(zlib_seed(variant.name))
    arguments = tuple(_placed(one, config.plan) for one in jax.tree.map(make, program.args))
    results = []
    for executable in (ours, device):
        put = _put(arguments, program.args)
        results.append([np.asarray(leaf) for leaf in jax.tree.leaves(executable(*put))])
    differs = []
    for number, (one, other) in enumerate(zip(*results, strict=True)):
        if one.tobytes() == other.tobytes():
            continue
        a, b = one.astype("f8"), other.astype("f8")
        differs.append(
            {
                "result": number,
                "shape": list(one.shape),
                "differing": float((one != other).mean()),
                "relative": float(np.linalg.norm(a - b) / (np.linalg.norm(b) or 1)),
            }
        )
    times: list[float | None] = [None, None]
    if not program.donate:
        put = _put(arguments, program.args)
        times = [_time(executable, put) for executable in (ours, device)]
    return Compared(variant.name, tuple(differs), compile_s, *times)


def _placed(argument: Any, plan: Any) -> Any:
    """Rows of a decoder's step at places of their own in the cache.

    Where two rows write to one place, the winner is another each time. Up to as many rows as there
    are sequences are one of each; more are prompts, behind empty rows of decode.
    """
    import numpy as np

    if not (isinstance(argument, dict) and "positions" in argument):
        return argument
    cache, rows = plan.cache, np.arange(len(argument["positions"]), dtype=np.int32)
    if len(rows) <= cache.sequences:
        return argument | {"sequences": rows, "positions": rows * 0}
    at, decode = rows - cache.sequences, rows < cache.sequences
    return argument | {
        "sequences": np.where(decode, rows, at // cache.length).astype(np.int32),
        "positions": np.where(decode, -1, at % cache.length).astype(np.int32),
    }


def _put(arrays: Any, abstract: Any) -> Any:
    """On the device, or on a mesh as the program wants them."""
    import jax

    shardings = jax.tree.map(lambda leaf: getattr(leaf, "sharding", None), abstract)
    return jax.tree.map(jax.device_put, arrays, shardings, is_leaf=lambda leaf: leaf is None)


def _time(executable: Any, put: Any) -> float:
    import jax

    jax.block_until_ready(executable(*put))
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for _ in range(_CALLS):
            out = executable(*put)
        jax.block_until_ready(out)
        found.append((time.perf_counter() - began) / _CALLS * 1e6)
    return statistics.median(found)


def zlib_seed(text: str) -> int:
    """A seed that another process finds too."""
    import zlib

    return zlib.crc32(text.encode())


class _Arrays:
    """Random arrays of abstract ones; integers are 0 or 1, which every index allows."""

    _held: dict[tuple[Any, ...], Any] = {}  # noqa: RUF012

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._rng = np.random.default_rng(seed)

    def __call__(self, leaf: Any) -> Any:
        import jax
        import numpy as np

        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
            return self._rng.integers(0, 2, leaf.shape).astype(leaf.dtype)
        key = leaf.shape, leaf.dtype  # random bytes of hundreds of MB are the slow part
        if key not in self._held:
            values = self._rng.standard_normal(leaf.shape, dtype="f4") / 8
            self._held[key] = np.asarray(values).astype(leaf.dtype)
        return self._held[key]


_WRONG = """\
model: {q_proj: [64, 64]}
target: {platform: cuda, topology: other.txtpb}
lora: {ranks: [8], slots: [1], max_adapters: 1}
tokens: {budget: 16, buckets: [16]}
store: {root: store}
"""


def wrong() -> None:
    """Warms up for a GPU that differs from this host's in one core, and opens that."""
    import aot_lora
    from aot_lora.errors import UnsupportedError
    from aot_lora.warmup import warmup

    shipped = (ROOT / "buckets/devices/h200.txtpb").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "wrong.yaml"
        path.write_text(_WRONG, encoding="utf-8")
        other = shipped.replace("core_count: 132", "core_count: 131")
        path.with_name("other.txtpb").write_text(other, encoding="utf-8")
        report = warmup(aot_lora.load_config(path))
        note(f"{report.compiled} compiled, {len(report.failed)} failed, {report.seconds} s")
        try:
            with aot_lora.Runtime.open(path):
                refused = ""
        except UnsupportedError as error:
            refused = str(error)
    print(json.dumps({"case": "cuda_deviceless/wrong", "refused": refused}), flush=True)
    if "not the one of the target config" not in refused:
        raise SystemExit("a server took the executables of another GPU")


def main(verb: str, *arguments: str) -> None:
    """Runs one of the two."""
    if verb == "wrong":
        wrong()
    else:
        config, store, *label = arguments
        compare(config, store, label[0] if label else "default")


if __name__ == "__main__":
    main(*sys.argv[1:])
