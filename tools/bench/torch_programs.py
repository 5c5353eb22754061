"""Torch: start through torchax from a store, and torch_xla's compiles after a warmup.

    .venv-torch/bin/python tools/bench/torch_programs.py start
    .venv-torch/bin/python tools/bench/torch_programs.py steps --steps 10000

Goals: `start` at most 1/5 of plain torchax with JAX's warm persistent cache; `steps` 0 compiles.
Nothing here imports torch: it would find this file. `torch_sides.py` does, in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lines import ROOT, child_environment, emit, note

_SIDES = Path(__file__).with_name("torch_sides.py")
_CONFIG = """\
model: {up_proj: [64, 128], down_proj: [128, 64]}
layers: 2
target: {platform: cpu}
lora: {ranks: [8, 16, 32, 64], slots: [0, 1], max_adapters: 4, dtype: float32}
tokens: {budget: 512, buckets: pow2, smallest: 1}
programs: [{entry: "torch_step:step"}]
store: {root: store}
"""  # 10 token buckets x (4 lane buckets and no adapter): 50 variants
_PEERS = {
    "plain": "torchax, jax.jit(step).lower().compile(), with a warm persistent cache",
    "cold": "torchax, jax.jit(step).lower().compile(), without a cache",
}


def main() -> None:
    """Runs one of the two."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("start", "steps"))
    parser.add_argument("--rounds", type=int, default=5, help="of start")
    parser.add_argument("--steps", type=int, default=10_000, help="of steps")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        folder = Path(name)
        (folder / "config.yaml").write_text(_CONFIG)
        shutil.copy(ROOT / "docs/examples/torch_step.py", folder)
        if options.what == "start":
            _start(folder, options.rounds)
        else:
            _steps(folder, options.steps)


def _start(folder: Path, rounds: int) -> None:
    note("warming both sides up")
    _python(folder, "-m", "aot_lora", "warmup", str(folder / "config.yaml"))
    _side("plain", folder)
    different = _side("compare", folder)["different"]
    if different:
        raise SystemExit(f"the comparison is not fair: {different} results differ")
    found: dict[str, list[dict[str, float]]] = {side: [] for side in ("ours", "plain", "cold")}
    for number in range(rounds):
        for side in found if number % 2 == 0 else reversed(found):
            found[side].append(_side(side, folder))
        note(f"round {number + 1} of {rounds}")
    misses = sum(one["misses"] for one in found["plain"])
    if misses:
        raise SystemExit(f"the comparison is not fair: JAX's cache missed {misses} times")
    for peer, text in _PEERS.items():
        for what, metric in (
            ("from_import", "from packages imported to all variants ready"),
            ("from_start", "from process start to all variants ready"),
        ):
            ours, theirs = (
                statistics.median(one[what] for one in found[side]) for side in ("ours", peer)
            )
            emit(
                case=f"torch/start-{found['ours'][0]['variants']:.0f}",
                metric=metric,
                value=ours,
                unit="s",
                peer=text,
                peer_value=theirs,
            )


def _steps(folder: Path, steps: int) -> None:
    found = _side("steps", folder, str(steps))
    if not found["control"]:
        raise SystemExit("a length outside the plan compiled nothing: the counter proves nothing")
    emit(
        case=f"torch/steps-{steps}",
        metric="graphs that torch_xla compiled, by its own counter, over random lengths",
        value=int(found["compiles"]),
        unit="1",
        peer="the same module and lengths without buckets",
        peer_value=int(found["unbucketed"]),
    )
    emit(
        case=f"torch/steps-{steps}",
        metric="median step, trace and guard included",
        value=found["ours_us"],
        unit="us",
        peer="the same call without the guard",
        peer_value=found["bare_us"],
    )


def _side(side: str, folder: Path, *more: str) -> dict[str, float]:
    command = (str(_SIDES), side, str(folder), str(time.monotonic()), *more)
    return json.loads(_python(folder, *command).splitlines()[-1])


def _python(folder: Path, *command: str) -> str:
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "PJRT_DEVICE": "CPU",
    }
    more = cache if "plain" in command else {"PJRT_DEVICE": "CPU"}
    done = subprocess.run(
        [sys.executable, *command],
        env=child_environment(**more),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
