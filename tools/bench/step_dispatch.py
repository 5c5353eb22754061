"""Case ``dispatch`` of step.py: a loaded step's call on the host against JAX's own `Compiled`."""

from __future__ import annotations

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

_CONFIG = """\
model: {{q_proj: [64, 64], k_proj: [64, 64], v_proj: [64, 64], o_proj: [64, 64],
         gate_proj: [64, 128], up_proj: [64, 128], down_proj: [128, 64]}}
layers: 2
decoder: {{hidden: 64, heads: 4, kv_heads: 4, head_dim: 16, intermediate: 128, vocab: 256,
           norm_eps: 1.0e-5, rope_theta: 10000.0}}
target: {{platform: cpu}}
mesh: {{tp: {devices}}}
lora: {{ranks: [16], slots: [0, 4], max_adapters: 4, dtype: float32}}
tokens: {{budget: 8, buckets: [8]}}
kv_cache: {{sequences: 4, length: 16}}
programs: [lora, {{entry: "aot_lora.decoder:decode_step"}}]
store: {{root: store}}
"""
_CALLS = 200


def dispatch(*, devices: int, rounds: int) -> None:
    """Times both on so many devices of this CPU, in turn; results are compared first."""
    flags = f"--xla_force_host_platform_device_count={devices}"
    os.environ.update(JAX_PLATFORMS="cpu", XLA_FLAGS=flags)  # before the first import of jax
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as name:
        path = Path(name) / "step.yaml"
        path.write_text(_CONFIG.format(devices=devices), encoding="utf-8")
        note("warming up")
        subprocess.run(
            [sys.executable, "-m", "aot_lora", "warmup", str(path)],
            check=True,
            env=child_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _measure(path, devices, rounds)


def _measure(path: Path, devices: int, rounds: int) -> None:
    import jax
    import numpy as np

    from aot_lora import Runtime
    from aot_lora.plan import Variant
    from aot_lora.programs.catalog import Catalog

    with Runtime.open(path) as runtime:
        found = runtime.lookup("decode_step", tokens=8, slots=4, rank=16)
        places = runtime.places.devices
        catalog = Catalog(runtime.plan, runtime.target, config=path, devices=places)
        program = catalog.program(Variant("decode_step", 8, found.lanes))
        ours = found.executable
    jitted = jax.jit(program.fn, donate_argnums=program.donate)
    theirs = jitted.lower(*program.args).compile()
    shardings = ours.input_shardings[0]
    values = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), program.args)
    leaves = zip(*map(jax.tree.leaves, (shardings, theirs.input_shardings[0], values)), strict=True)
    if not all(mine.is_equivalent_to(other, value.ndim) for mine, other, value in leaves):
        raise SystemExit("the two take their arguments from different places")
    state = {"ours": jax.device_put(values, shardings), "theirs": jax.device_put(values, shardings)}

    def call(side: str, step: Callable[..., Any]) -> Any:
        weights, cache, *rest = state[side]
        tokens, cache = step(weights, cache, *rest)
        state[side] = (weights, cache, *rest)
        return tokens

    if not np.array_equal(call("ours", ours), call("theirs", theirs)):
        raise SystemExit("the two give different results")
    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for side, step in (("ours", ours), ("theirs", theirs)):
            spent = 0.0
            for _ in range(_CALLS):
                began = time.perf_counter()
                tokens = call(side, step)
                spent += time.perf_counter() - began
                tokens.block_until_ready()  # outside the clock: only the host's part counts
            times[side].append(spent / _CALLS)
    pairs = [a - b for a, b in zip(times["ours"], times["theirs"], strict=True)]
    case = f"step/dispatch-{devices}-devices"
    emit(
        case=case,
        metric="a call of a loaded step, on the host",
        value=statistics.median(times["ours"]) * 1e6,
        unit="us",
        peer="JAX's Compiled",
        peer_value=statistics.median(times["theirs"]) * 1e6,
    )
    emit(
        case=case,
        metric="above JAX's Compiled, median of pairs",
        value=statistics.median(pairs) * 1e6,
        unit="us",
    )
