"""What a sealed runtime costs while it serves: a soak, and adapters from file to slot.

    python tools/bench/runtime.py soak
    python tools/bench/runtime.py load [--platform cuda]
    python tools/bench/runtime.py serve [--platform cuda]

Goals: 1,000,000 steps with a load or unload every 100 without a compile, a trace or growing memory;
an adapter from file to slot at 70 % of the speed of reading and copying its bytes; decode steps
while another thread loads adapters at most 5 % slower than without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lines import child_environment, emit, note

_LOADED = """\
model: llama-3.1-8b
target: {{platform: {platform}}}
lora: {{ranks: [16, 64], slots: [1, 2], max_adapters: 2, resident_lanes: 128}}
tokens: {{budget: 16, buckets: [16]}}
adapters: {{host_cache: 2GiB}}
"""


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("soak", "load", "serve"))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--switch-ms", type=float, help="serve: how long Python lets a thread run (5 ms by default)"
    )
    options = parser.parse_args()
    if options.switch_ms is not None:
        sys.setswitchinterval(options.switch_ms / 1e3)
    if options.platform == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"  # before the first import of jax
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        if options.case == "soak":
            _soak(Path(name), options.steps)
        elif options.case == "serve":
            _serve(Path(name), options.platform, options.rounds)
        else:
            _load(Path(name), options.platform, options.rounds)


def _open(folder: Path, config: str, platform: str = "cpu") -> Any:
    note("warming up")
    environment = child_environment() if platform == "cpu" else dict(os.environ)
    command = [sys.executable, "-m", "aot_lora", "warmup", config, "--store", str(folder / "store")]
    quiet = subprocess.DEVNULL
    subprocess.run(command, check=True, env=environment, stdout=quiet, stderr=quiet)

    from aot_lora import Runtime

    return Runtime.open(config, store=str(folder / "store"))


def _write_adapter(folder: Path, plan: Any, rank: int, seed: int) -> Path:
    """A PEFT folder of all modules and layers of a plan, in its dtype."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.numpy import save_file

    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(plan.dtype)
    tensors: dict[str, np.ndarray] = {}
    for module in plan.modules:
        for layer in range(module.layers):
            path = f"base_model.model.model.layers.{layer}.x.{module.name}"
            for half, shape in (("A", (rank, module.d)), ("B", (module.o, rank))):
                values = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
                tensors[f"{path}.lora_{half}.weight"] = values.astype(dtype)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


# --- Soak -----------------------------------------------------------------------------------------


def _soak(folder: Path, steps: int) -> None:
    import jax
    import numpy as np

    from aot_lora import errors
    from aot_lora.kernels.reference import lora

    events: list[str] = []
    runtime = _open(folder, "cpu/quickstart")
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    plan, dice = runtime.plan, random.Random(0)
    folders = [
        _write_adapter(folder / str(index), plan, dice.randint(1, 32), index) for index in range(24)
    ]
    modules = [(module, layer) for module in plan.modules for layer in range(module.layers)]
    rng = np.random.default_rng(0)
    inputs = {
        m.name: rng.standard_normal((plan.tokens.buckets[-1], m.d), np.float32)
        for m in plan.modules
    }
    packed: dict[int, Any] = {}
    warm_bytes, checked, began = 0, 0, time.perf_counter()
    for step in range(steps):
        if step % 100 == 0:
            _change(runtime, dice, folders, packed, errors)
        slots = _mix(runtime, dice)
        module, layer = modules[step % len(modules)]
        x = inputs[module.name][: len(slots)]
        y = runtime.apply(module.name, x, slots, layer=layer)
        if step % 1000 == 0:
            held = {}
            for slot, one in packed.items():
                own = one.modules[module.name]
                held[slot] = (own.a[layer], own.b[layer].T * own.scale[layer])
            expected = lora(x, np.zeros((len(slots), module.o), np.float32), held, slots)
            if not np.allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4):
                raise SystemExit(f"step {step}: the result is wrong")
            checked += 1
        elif step % 16 == 0:
            y.array.block_until_ready()
        if step == steps // 10:
            warm_bytes = _resident_bytes()
    seconds = time.perf_counter() - began
    work = [event for event in events if "trace" in event or "mlir" in event or "compile" in event]
    counts = runtime.metrics.snapshot()
    case = "soak/cpu"
    emit(case=case, metric="steps", value=steps, unit="count")
    emit(case=case, metric="steps whose result was checked", value=checked, unit="count")
    emit(case=case, metric="adapters loaded", value=counts["loads"], unit="count")
    emit(case=case, metric="compiles and traces", value=len(work), unit="count")
    emit(
        case=case,
        metric="resident memory at the end",
        value=_resident_bytes() / 1e6,
        unit="MB",
        peer="after a tenth of the steps",
        peer_value=warm_bytes / 1e6,
    )
    emit(case=case, metric="time", value=seconds, unit="s")
    runtime.close()
    jax.jit(lambda x: x + 1)(np.ones(3))
    if not any("compile" in event for event in events):
        raise SystemExit("the positive control failed: a compile was not seen")


def _change(runtime: Any, dice: random.Random, folders: list[Path], packed: dict, errors: Any):
    """Loads an adapter, or unloads one where the dice or full banks say so."""
    resident = runtime.adapters.resident
    if resident and dice.random() < 0.4:
        name = dice.choice(list(resident))
        runtime.adapters.unload(name)
        del packed[resident[name]]
        return
    folder = dice.choice(folders)
    try:
        slot = runtime.adapters.load(folder)
        packed[slot] = runtime.adapters.host.get(folder)
    except errors.CapacityError:
        name = dice.choice(list(resident))
        runtime.adapters.unload(name)
        del packed[resident[name]]


def _mix(runtime: Any, dice: random.Random) -> Any:
    import numpy as np

    chosen = dice.sample(list(runtime.banks.owned), min(len(runtime.banks.owned), 3))
    chosen = chosen or [-1]
    count = dice.randint(1, runtime.plan.tokens.buckets[-1])
    return np.array([dice.choice((*chosen, -1)) for _ in range(min(count, 4))] * (count // 4 or 1))


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


# --- Load -----------------------------------------------------------------------------------------


def _load(folder: Path, platform: str, rounds: int) -> None:
    import jax
    import numpy as np

    from aot_lora.adapters import pack, read_adapter

    config = folder / "loaded.yaml"
    config.write_text(_LOADED.format(platform=platform), encoding="utf-8")
    runtime = _open(folder, str(config), platform)
    for rank in (16, 64):
        path = _write_adapter(folder / f"r{rank}", runtime.plan, rank, rank)
        file = path / "adapter_model.safetensors"
        runtime.adapters.load(path, name="other")  # the first write of a bank may copy it
        _check_slot(runtime, path)
        runtime.adapters.unload("other")

        def bare(file: Path = file) -> None:
            """Reads the bytes into memory and copies them to the device."""
            data = np.empty(file.stat().st_size, np.uint8)
            with file.open("rb", buffering=0) as stream:
                view, done = memoryview(data), 0
                while done < len(view):
                    done += stream.readinto(view[done:])
            jax.device_put(data, runtime.device).block_until_ready()

        def from_file(path: Path = path) -> None:
            packed = pack(read_adapter(path), runtime.plan)
            runtime.banks.put(0, packed)
            jax.block_until_ready(runtime.banks.arrays)

        def from_host(path: Path = path) -> None:
            runtime.adapters.load(path)
            jax.block_until_ready(runtime.banks.arrays)

        for state in ("page cache", "cold"):
            pairs = []
            for _ in range(rounds):
                pair = []
                for work in (from_file, bare):
                    if state == "cold":
                        _forget(file)
                    pair.append(_seconds(work))
                    runtime.banks.reset(0)
                    jax.block_until_ready(runtime.banks.arrays)
                pairs.append(pair)
            emit(
                case=f"load/{platform}/r{rank}",
                metric=f"file to slot, {state}",
                value=statistics.median(ours for ours, _ in pairs),
                unit="s",
                peer="read and copy of the bytes",
                peer_value=statistics.median(bare_s for _, bare_s in pairs),
            )
        times = []
        for _ in range(rounds):
            runtime.adapters.load(path)
            runtime.adapters.unload(str(path))
            jax.block_until_ready(runtime.banks.arrays)
            times.append(_seconds(from_host))
            runtime.adapters.unload(str(path))
        emit(
            case=f"load/{platform}/r{rank}",
            metric="host cache to slot",
            value=statistics.median(times),
            unit="s",
        )
    runtime.close()


def _check_slot(runtime: Any, path: Path) -> None:
    """The loaded lanes are those of the file."""
    import numpy as np

    packed = runtime.adapters.host.get(path)
    (slot,) = runtime.adapters.resident.values()
    blocks = list(runtime.banks.owned[slot])
    for name, own in packed.modules.items():
        a_bank, b_bank = (np.asarray(bank) for bank in runtime.banks.arrays[name])
        a = a_bank[:, blocks].reshape(own.a.shape)
        b = b_bank[:, blocks].reshape(own.b.swapaxes(1, 2).shape)
        if not (np.array_equal(a, own.a) and np.array_equal(b, own.b.swapaxes(1, 2))):
            raise SystemExit(f"{name}: the bank holds other weights than the file")


# --- Serve ----------------------------------------------------------------------------------------

_SERVED = """\
model: {model}
target: {{platform: {platform}}}
lora: {{ranks: [16, 64], slots: [8], max_adapters: 12, resident_lanes: 384, dtype: {dtype}}}
tokens: {{budget: 16, buckets: [16]}}
kv_cache: {{sequences: 16, length: 2048}}
programs: [lora, {{entry: "aot_lora.decoder:decode_step"}}]
adapters: {{host_cache: {cache}}}
"""
_SEGMENT_SECONDS = 2.0


def _serve(folder: Path, platform: str, rounds: int) -> None:
    """Decode steps of 16 rows and 8 adapters, without loads and beside a thread that loads."""
    model, dtype = ("llama-3.1-8b", "bfloat16") if platform == "cuda" else ("tiny", "float32")
    config = folder / "served.yaml"

    def write(cache: str) -> None:
        text = _SERVED.format(model=model, platform=platform, dtype=dtype, cache=cache)
        config.write_text(text, encoding="utf-8")

    write("1")
    from aot_lora import load_config

    plan = load_config(config).plan
    base = [_write_adapter(folder / f"base{n}", plan, 16, n) for n in range(8)]
    from decoder_steps import random_weights

    weights = random_weights(plan, load_config(config).targets[0])
    # A byte of host cache holds no adapter: each load reads its file.
    for cache, source in (("1", "files"), ("2GiB", "the host cache")):
        write(cache)
        runtime = _open(folder, str(config), platform)
        for rank in (16, 64):
            loaded = folder / f"loaded{rank}"
            if not loaded.exists():
                _write_adapter(loaded, plan, rank, 100 + rank)
            for path in base:
                runtime.adapters.load(path)
            _measure_serving(runtime, weights, loaded, f"serve/{platform}/r{rank}", source, rounds)
        runtime.close()


def _measure_serving(
    runtime: Any, weights: Any, loaded: Path, case: str, source: str, rounds: int
) -> None:
    import jax
    import numpy as np

    from aot_lora.kernels.blocks import NOBODY

    plan = runtime.plan
    found = runtime.lookup("decode_step", tokens=16, slots=8, rank=16)
    blocks = [(block, slot) for slot, own in runtime.banks.owned.items() for block in own]
    blocks += [(0, NOBODY)] * (found.lanes // plan.quantum - len(blocks))
    block, owners = np.array(blocks, np.int32).T
    rows = np.arange(16, dtype=np.int32)
    cache = jax.tree.map(
        lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), runtime.device),
        found.executable.args_info[0][1],
    )
    state = {"cache": cache}
    rest = jax.device_put(
        (
            {"tokens": rows, "positions": np.full(16, 1024, np.int32), "sequences": rows},
            {
                "rows": rows,
                "temperature": np.zeros(16, np.float32),
                "seeds": np.zeros(16, np.uint32),
            },
        ),
        runtime.device,
    )
    batch = jax.device_put(
        {"blocks": block.copy(), "owners": owners.copy(), "slots": rows % 8}, runtime.device
    )

    def step() -> Any:
        with runtime.banks.reading() as banks:
            tokens, state["cache"] = found.executable(weights, state["cache"], *rest, banks, batch)
        return np.asarray(tokens)

    expected = step()
    stop, loads = threading.Event(), [0]

    def load() -> None:
        while not stop.is_set():
            runtime.adapters.load(loaded, name="loaded")
            runtime.adapters.unload("loaded")
            loads[0] += 1

    def segment() -> list[float]:
        times: list[float] = []
        end = time.perf_counter() + _SEGMENT_SECONDS
        while time.perf_counter() < end:
            began = time.perf_counter()
            tokens = step()
            times.append(time.perf_counter() - began)
            if not np.array_equal(tokens, expected):
                raise SystemExit(f"{case}: a step beside a load says something else")
        return times

    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        alone += segment()
        stop.clear()
        thread = threading.Thread(target=load)
        thread.start()
        beside += segment()
        stop.set()
        thread.join()
    if not loads[0]:
        raise SystemExit(f"{case}: no adapter was loaded")
    note(f"{case}, from {source}: {loads[0]} loads beside {len(beside)} steps")
    for name, of in (
        ("median", statistics.median),
        ("mean", statistics.mean),
        ("99th percentile", _p99),
    ):
        emit(
            case=case,
            metric=f"{name} of a decode step while adapters load from {source}",
            value=of(beside) * 1e3,
            unit="ms",
            peer="without loads",
            peer_value=of(alone) * 1e3,
        )


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


def _forget(file: Path) -> None:
    """Drops a file from the page cache, as far as the system lets us."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
