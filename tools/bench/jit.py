"""`aot_lora.jit`: what a call costs, and three ways to start an engine that warms itself up.

    python tools/bench/jit.py dispatch
    python tools/bench/jit.py starts
    python tools/bench/jit.py step [--platform cuda]

Goals: a call with 300 array leaves at most 20 us above `jax.jit`; a step of 32 layers ready from
the store at least ten times as fast as through JAX's warm persistent cache.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lines import child_environment, emit, note

_SIDES = Path(__file__).with_name("jit_sides.py")
_CASES = {"starts": (4, "8,16,32,64,128,256"), "step": (32, "16")}
_PEERS = {"cold": "jax.jit, cold", "cached": "jax.jit, JAX's warm persistent cache"}


def main() -> None:
    """Runs one of the cases."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", choices=("dispatch", *_CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        if options.case == "dispatch":
            os.environ["JAX_PLATFORMS"] = options.platform  # before the first import of jax
            _dispatch(Path(name), options.rounds)
        else:
            _starts(options.case, options.platform, Path(name), options.rounds)


# --- Dispatch -------------------------------------------------------------------------------------


def _dispatch(folder: Path, rounds: int) -> None:
    import jax
    import numpy as np

    import aot_lora

    leaves = {
        f"layer {n}": {"a": (np.full((4, 4), n, np.float32),), "b": [np.ones(4, np.float32)] * 2}
        for n in range(100)
    }
    arguments = jax.device_put(leaves)
    theirs = jax.jit(_total)
    ours = aot_lora.jit(_total, program="total")
    with aot_lora.recording("bench", folder):
        recorded = ours(arguments)
    expected = theirs(arguments)
    with aot_lora.replay("bench", folder):
        if not np.array_equal(ours(arguments), expected) or not np.array_equal(recorded, expected):
            raise SystemExit("the results differ")
        calls = 1000
        pairs: list[tuple[float, float]] = []
        for number in range(rounds * 3):
            order = (ours, theirs) if number % 2 else (theirs, ours)
            took = {id(call): _us(call, arguments, calls) for call in order}
            pairs.append((took[id(ours)], took[id(theirs)]))
    emit(
        case="jit/dispatch-300",
        metric="call in a replay",
        value=statistics.median(pair[0] for pair in pairs),
        unit="us",
        peer="jax.jit",
        peer_value=statistics.median(pair[1] for pair in pairs),
    )
    above = statistics.median(one - other for one, other in pairs)
    emit(case="jit/dispatch-300", metric="call in a replay: above jax.jit", value=above, unit="us")


def _total(leaves: Any) -> Any:
    return sum(layer["a"][0][0] + layer["b"][0] * layer["b"][1] for layer in leaves.values())


def _us(call: Callable[[Any], Any], arguments: Any, calls: int) -> float:
    out = call(arguments)
    began = time.perf_counter()
    for _ in range(calls):
        out = call(arguments)
    took = time.perf_counter() - began
    out.block_until_ready()
    return took / calls * 1e6


# --- Starts ---------------------------------------------------------------------------------------


def _starts(case: str, platform: str, folder: Path, rounds: int) -> None:
    layers, tokens = _CASES[case]
    note("recording, and filling JAX's cache")
    for side in ("record", "cached", "sealed"):  # the last writes the bytecode
        _run(side, platform, folder, layers, tokens)
    sides = ("cold", "cached", "sealed")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(rounds):
        for side in sides if number % 2 == 0 else reversed(sides):
            found[side].append(_run(side, platform, folder, layers, tokens))
        note(f"round {number + 1} of {rounds}")
    sums = {one["sum"] for side in sides for one in found[side]}
    if len(sums) != 1:
        raise SystemExit(f"the results differ: {sums}")
    if any(one["traces"] for one in found["sealed"]):
        raise SystemExit("a sealed start traced")

    def median(side: str, what: str) -> float:
        return statistics.median(one[what] for one in found[side])

    name = "jit/engine-4-layers-6-buckets" if case == "starts" else "jit/step-32-layers"
    name = name if platform == "cpu" else f"{name}-{platform}"
    for what, metric in (
        ("ready", "sealed: store opened, every executable ready"),
        ("warm_up", "sealed: store opened and warm-up run"),
        ("from_import", "sealed: from jax imported to warmed up"),
        ("from_start", "sealed: from process start to warmed up"),
    ):
        for peer, text in _PEERS.items():
            emit(
                case=name,
                metric=metric,
                value=median("sealed", what),
                unit="s",
                peer=text,
                peer_value=median(peer, what),
            )


def _run(side: str, platform: str, folder: Path, layers: int, tokens: str) -> dict[str, float]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    more = {**(cache if side == "cached" else {}), "JAX_PLATFORMS": platform}
    environment = child_environment(**more)
    command = [sys.executable, str(_SIDES), side, str(folder), str(layers), tokens]
    done = subprocess.run(
        [*command, str(time.monotonic())],
        check=False,
        env=environment,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
