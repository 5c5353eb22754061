"""A decoder's step.

    python tools/bench/step.py compile
    python tools/bench/step.py compile --case 8b-v6e-1x1
    python tools/bench/step.py serve --platform cuda --model llama-3.1-8b --tokens 16 --decode
    python tools/bench/step.py dispatch --devices 4

`compile`: the wall clock of a cold `warmup` that holds nothing but steps, with the real TPU
compiler and no TPU. Goals, on 2 cores: Llama-3.1-70B's shape on v6e:2x4 in under 2 minutes, 8B on
v6e:1x1 in under 1.
`serve`: a step with adapters of several mixes against the same step without.
`dispatch`: calling a loaded step, on the host. Goal: at most 2 us above JAX's own `Compiled`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from decoder_steps import serve
from lines import child_environment, emit, note
from step_dispatch import dispatch

_CONFIG = """\
model: {model}
target: {{platform: tpu, topology: "{topology}"}}
mesh: {{tp: {tp}}}
kv_cache: {{sequences: 16, length: 2048}}
lora: {{modules: all-linear, ranks: [16], slots: [0, 8], max_adapters: 8}}
tokens: {{budget: 2048, buckets: pow2}}
programs: [{programs}]
"""
_STEPS = {
    "mixed_step": '{entry: "aot_lora.decoder:mixed_step"}',
    # One row for each sequence is the most it is called with.
    "decode_step": '{entry: "aot_lora.decoder:decode_step", max_tokens: 16}',
}
# model, topology, chips, the goal in seconds
_CASES = {
    "8b-v6e-1x1": ("llama-3.1-8b", "v6e:1x1", 1, 60),
    "70b-v6e-2x4": ("llama-3.1-70b", "v6e:2x4", 8, 120),
}


def compile_(options: argparse.Namespace) -> None:
    """A cold warmup of each case: all token buckets of the steps, with and without adapters."""
    for case in options.case or _CASES:
        model, topology, tp, goal = _CASES[case]
        steps = ", ".join(_STEPS[name] for name in options.step)
        with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
            config = Path(name) / f"{case}.yaml"
            text = _CONFIG.format(model=model, topology=topology, tp=tp, programs=steps)
            config.write_text(text, encoding="utf-8")
            seconds, report = _warmup(config, Path(name) / "store")
        note(f"{case}: {report}")
        if report["failed"]:
            raise SystemExit(f"{case}: {report['failed']} variants failed")
        emit(
            case=f"step/compile/{case}",
            metric=f"cold warmup of {report['variants']} steps ({', '.join(options.step)})",
            value=seconds,
            unit="s",
            peer="the goal",
            peer_value=goal,
        )


def serve_(options: argparse.Namespace) -> None:
    """Whole steps with adapters."""
    serve(
        model=options.model,
        platform=options.platform,
        tokens=options.tokens,
        decode=options.decode,
        rounds=options.rounds,
    )


def dispatch_(options: argparse.Namespace) -> None:
    """A call on the host."""
    dispatch(devices=options.devices, rounds=options.rounds)


def _warmup(config: Path, store: Path) -> tuple[float, dict[str, Any]]:
    verb = [sys.executable, "-m", "aot_lora", "warmup", str(config), "--store", str(store)]
    began = time.monotonic()
    done = subprocess.run(
        [*verb, "--format", "json"],
        check=False,
        env=child_environment(),
        stdout=subprocess.PIPE,
    )
    return time.monotonic() - began, json.loads(done.stdout)


def main() -> None:
    """Picks the part to run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    part = parts.add_parser("compile")
    part.add_argument("--case", action="append", choices=_CASES, help="both unless given")
    part.add_argument("--step", nargs="+", choices=_STEPS, default=[*_STEPS])
    part.set_defaults(run=compile_)
    part = parts.add_parser("serve")
    part.add_argument("--platform", choices=("cpu", "cuda"), default="cpu")
    part.add_argument("--model", default="tiny")
    part.add_argument("--tokens", type=int, default=16)
    part.add_argument("--decode", action="store_true", help="one token a sequence, else prompts")
    part.add_argument("--rounds", type=int, default=5)
    part.set_defaults(run=serve_)
    part = parts.add_parser("dispatch")
    part.add_argument("--devices", type=int, default=1)
    part.add_argument("--rounds", type=int, default=21)
    part.set_defaults(run=dispatch_)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
