"""Warm start: `Runtime.open` against JAX's warm persistent cache, and against bare loads.

    python tools/bench/warm_start.py --variants 200

Goals: from jax imported a ratio of at most 0.1; from process start at most 1/3.5 at 200 variants
and 1/8 at 1,000; at most 2 against reading and bare deserialising of the same bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from configs import write_config
from lines import child_environment, cores, emit, note

_SIDES = Path(__file__).with_name("warm_start_sides.py")
_PEERS = {
    "jax_compile": "jax.jit(f).lower().compile() with a warm persistent cache",
    "jax_call": "jax.jit(f)(...) with a warm persistent cache",
}
_TIMED = ("open_runtime", "jax_compile", "jax_call", "bare", "bare_one_thread")


def main() -> None:
    """Prepares both sides, checks that they agree, times them in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variants", type=int, choices=(200, 1000), default=200)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        folder = Path(name)
        variants = _prepare(folder, options.variants)
        rounds: dict[str, list[dict[str, float]]] = {side: [] for side in _TIMED}
        for number in range(options.rounds):
            for side in _TIMED if number % 2 == 0 else reversed(_TIMED):
                found = _run(side, folder)
                _require(found["variants"] == variants, f"{side} readied {found['variants']}")
                if side in _PEERS:
                    hits, misses = found["hits"], found["misses"]
                    _require((hits, misses) == (variants, 0), f"{hits} hits, {misses} misses")
                rounds[side].append(found)
            note(f"round {number + 1} of {options.rounds}")
    _report(f"warm_start/cpu-{variants}", rounds)


def _prepare(folder: Path, variants: int) -> int:
    config = write_config(folder, variants=variants)
    config.rename(folder / "config.yaml")
    note("warming both sides up")
    subprocess.run(
        [sys.executable, "-m", "aot_lora", "warmup", str(folder / "config.yaml")],
        check=True,
        env=child_environment(AOT_LORA_CACHE=str(folder / "store")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    count = int(_run("prepare", folder)["variants"])
    compared = _run("compare", folder)
    _require(not compared["different"], f"{compared['different']} results differ")
    _run("open_runtime", folder)  # writes the bytecode, as an installation does
    return count


def _run(side: str, folder: Path) -> dict[str, float]:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    environment = child_environment(**(cache if side in (*_PEERS, "prepare", "compare") else {}))
    command = [sys.executable, str(_SIDES), side, str(folder), str(time.monotonic())]
    done = subprocess.run(command, check=True, env=environment, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SystemExit(f"the comparison is not fair: {otherwise}")


def _report(case: str, rounds: dict[str, list[dict[str, float]]]) -> None:
    def median(side: str, what: str) -> float:
        return statistics.median(found[what] for found in rounds[side])

    for peer, text in _PEERS.items():
        for what, metric in (
            ("from_import", "from jax imported to all variants ready"),
            ("from_start", "from process start to all variants ready"),
        ):
            emit(
                case=case,
                metric=metric,
                value=median("open_runtime", what),
                unit="s",
                peer=text,
                peer_value=median(peer, what),
            )
    for peer, threads in (("bare", cores()), ("bare_one_thread", 1)):
        emit(
            case=case,
            metric="Runtime.open",
            value=median("open_runtime", "open"),
            unit="s",
            peer=f"read and deserialise the same bytes, threads: {threads}",
            peer_value=median(peer, "open"),
        )


if __name__ == "__main__":
    main()
