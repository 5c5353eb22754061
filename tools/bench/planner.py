"""Buckets fitted to traffic: what they waste, against powers of two, a step and vLLM's list.

    python tools/bench/planner.py waste --traces DIR
    python tools/bench/planner.py speed
    python tools/bench/planner.py points
    python tools/bench/planner.py grids --traces DIR
    python tools/bench/planner.py refusals

`DIR` holds `conv.csv` and `code.csv` of Azure/AzurePublicDataset, "AzureLLMInferenceTrace" of 2023
(CC BY 4.0; Patel et al., "Splitwise", ISCA 2024), which this repository does not ship.

Goals: 10 buckets waste at most 10.0 % (conv) and 15.6 % (code) of prompts clipped to 8,192 tokens,
and 1 point more on a held-out half; of simulated steps, vLLM's waste with half its buckets; a
million requests in under 10 s and 1 GiB; 100,000 points planned in under 2 s.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from lines import child_environment, emit, note

from aot_lora.config import find_config, load_config
from aot_lora.config.limits import replanner
from aot_lora.config.load import read
from aot_lora.config.traffic import read_traffic
from aot_lora.errors import PlanError
from aot_lora.plan import Module, build_plan
from aot_lora.plan.chips import work
from aot_lora.plan.compare import Lengths, compare, lengths_of
from aot_lora.plan.fit import candidates, fit, waste
from aot_lora.plan.grids import Search
from aot_lora.plan.mix import mix_of_steps
from aot_lora.plan.product import Wanted, fit_grid, pow2_grid
from aot_lora.plan.simulate import Server, simulate

_CLIP, _BUDGET = 8192, 2048
_PRESET = "tpu-v6e/llama-3.1-8b"
# As documented for `cudagraph_capture_sizes`, with a `max_cudagraph_capture_size` of 512, its
# default for 256 sequences. https://docs.vllm.ai/en/latest/api/vllm/config/compilation/
_VLLM = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))


def waste_of_traces(options: argparse.Namespace) -> None:
    """Waste of each policy on both traces: prompts, simulated steps, vLLM's list."""
    for name in ("conv", "code"):
        traffic = read_traffic(options.traces / f"{name}.csv")
        prompts, _ = lengths_of(traffic, of="prompts", server=Server(budget=_CLIP))
        for count in (6, 8, 10, 16, 20):
            _compared(f"planner/{name}-prompts-{count}", prompts, count, _CLIP)
        steps, made = lengths_of(traffic, of="steps", server=Server(budget=_BUDGET))
        assert made is not None
        note(f"{name}: {made.count:,} steps, late by {made.late_seconds:.0f} s")
        for count in (4, 6, 8, 12):
            _compared(f"planner/{name}-steps-{count}", steps, count, _BUDGET)
        _against_vllm(name, steps)


def _compared(case: str, lengths: Lengths, count: int, budget: int) -> None:
    pow2, step, best = compare(lengths, count=count, multiple=16, budget=budget)
    for peer in (pow2, step):
        _line(case, "waste", best.waste, f"{peer.name}, {len(peer.buckets)} buckets", peer.waste)
    _line(case, "waste, held-out half", best.held_out, "same, on the whole trace", best.waste)
    _line(case, "waste, later half", best.later, "same, on the whole trace", best.waste)


def _against_vllm(name: str, steps: Lengths) -> None:
    """Of steps within the list: the fit with half as many buckets, and the fewest that suffice."""
    lengths, counts = steps.counted()
    kept = lengths <= _VLLM[-1]
    lengths, counts = lengths[kept], counts[kept]
    theirs = waste(_VLLM, lengths, counts)
    for multiple, small in ((1, False), (4, True), (8, True)):
        grid = f"multiples of {multiple}" + (" and smaller powers of two" if small else "")

        def ours(count: int, multiple: int = multiple, small: bool = small) -> float:
            found = fit(
                lengths, counts, count=count, multiple=multiple, budget=_VLLM[-1], small=small
            )
            return waste(found, lengths, counts)

        half = len(_VLLM) // 2
        case = f"planner/{name}-vllm"
        peer = f"vLLM's list, {len(_VLLM)} buckets"
        _line(case, f"waste, {half} buckets, {grid}", ours(half), peer, theirs)
        enough = next((n for n in range(1, len(_VLLM)) if ours(n) <= theirs), None)
        if enough is None:
            note(f"{case}: {grid} do not reach {theirs:.4f} with fewer buckets than the list")
            continue
        emit(
            case=case,
            metric=f"buckets of no more waste, {grid}",
            value=enough,
            unit="buckets",
            peer="vLLM's list",
            peer_value=len(_VLLM),
        )


def speed(options: argparse.Namespace) -> None:
    """Whole `aot-lora fit` processes on a made-up trace: wall seconds and peak memory."""
    with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as folder:
        trace = Path(folder) / "trace.csv"
        _write_trace(trace, options.requests)
        for of in ("prompts", "steps"):
            command = [sys.executable, "-m", "aot_lora", "fit", str(trace), "--of", of]
            budget = ["--budget", str(_CLIP if of == "prompts" else _BUDGET)]
            start = time.perf_counter()
            done = subprocess.run(
                [*command, *budget, "--format", "json"],
                env=child_environment(),
                capture_output=True,
                check=True,
                text=True,
            )
            seconds = time.perf_counter() - start
            found = json.loads(done.stdout)
            assert found["requests"] == options.requests
            case = f"planner/{options.requests}-{of}"
            note(f"{case}: {found['steps']} steps, {done.stderr.strip()}")
            emit(case=case, metric="wall time, whole process", value=seconds, unit="s")
            peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
            emit(case=case, metric="peak memory, so far", value=peak, unit="bytes")


def _write_trace(path: Path, requests: int) -> None:
    """Lengths of about the conversation trace's spread, 6 requests a second."""
    random = np.random.default_rng(0)
    prompts = np.clip(random.lognormal(6.5, 1.1, requests), 1, 20_000).astype(int)
    outputs = np.clip(random.lognormal(5.0, 0.9, requests), 1, 1_000).astype(int)
    seconds = np.cumsum(random.exponential(1 / 6, requests))
    rows = zip(seconds.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    with path.open("w") as file:
        file.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        file.writelines(f"{at:.6f},{prompt},{output}\n" for at, prompt, output in rows)


def points(options: argparse.Namespace) -> None:
    """500 tokens x 20 slots x 10 ranks, planned."""
    del options
    sizes = (("q_proj", 4096, 4096), ("k_proj", 4096, 1024), ("down_proj", 14336, 4096))
    start = time.perf_counter()
    plan = build_plan(
        token_buckets=tuple(range(8, 8 * 501, 8)),
        slots=tuple(range(20)),
        ranks=tuple(range(8, 88, 8)),
        modules=tuple(Module(name=name, d=d, o=o, layers=32) for name, d, o in sizes),
        layers=32,
        dtype="bfloat16",
        quantum=8,
        max_adapters=32,
        resident_lanes=4096,
        with_lora=True,
        user=(),
    )
    seconds = time.perf_counter() - start
    emit(case=f"planner/{plan.points}-points", metric="wall time", value=seconds, unit="s")


def grids(options: argparse.Namespace) -> None:
    """All axes of the v6e preset under limits, against powers of two and against tokens alone.

    The traces name no adapters, so each request is given one of 8, the n-th with weight 1 / n.
    """
    config = read(_PRESET)
    plan, replan = config.written_plan, replanner(config.asked, config.written_plan)
    cost = work(plan)
    for name in ("conv", "code"):
        traffic = read_traffic(options.traces / f"{name}.csv")
        weights = 1 / np.arange(1, 9)
        drawn = np.random.default_rng(0).choice(8, len(traffic), p=weights / weights.sum())
        steps = simulate(replace(traffic, adapters=drawn), Server(budget=_BUDGET))
        for most in (100, 200, 400):
            wanted = Wanted(
                plan=plan, most=most, budget=_BUDGET, count=None, multiple=16, small=False,
                slots=4, ranks=None,
            )  # fmt: skip
            search = Search(mix_of_steps(steps, plan), replan, cost, quantum=plan.quantum)
            sizes, _ = candidates(
                steps.tokens, steps.repeats, multiple=16, budget=_BUDGET, small=False
            )
            now = (plan.slots, plan.ranks)
            alone = search.best(sizes.tolist(), [now], most=most)
            start = time.perf_counter()
            pow2, best = fit_grid(
                steps, wanted, replan, cost, edges=[], others=[("pow2", pow2_grid(wanted, last=8))]
            )
            seconds = time.perf_counter() - start
            assert len(replan(best.grid).variants) == best.variants <= most
            case = f"planner/{name}-grid-{most}"
            least = search.as_is()
            _line(case, "waste", best.waste, f"pow2, {pow2.variants} variants", pow2.waste)
            if alone is not None:
                peer = f"tokens alone, {alone.variants} variants"
                _line(case, "waste", best.waste, peer, alone.cost / least - 1)
            _line(case, "waste, held-out half", best.held_out, "on the whole trace", best.waste)
            _line(case, "waste, later half", best.later, "on the whole trace", best.waste)
            emit(case=case, metric="fit, with both halves", value=seconds, unit="s")


def refusals(options: argparse.Namespace) -> None:
    """How long a plan above its limit takes to name its changes, as `load_config` does."""
    del options
    text = find_config(_PRESET).read_text()
    for most in (20, 100, 300):
        with tempfile.TemporaryDirectory(prefix="aot-lora-bench-") as folder:
            path = Path(folder) / "limited.yaml"
            path.write_text(f"{text}\nlimits: {{variants: {most}}}\n")
            said = ""
            start = time.perf_counter()
            try:
                load_config(path)
            except PlanError as error:
                said = str(error)
            seconds = time.perf_counter() - start
            assert "next: write `" in said
            emit(case=f"planner/refusal-{most}", metric="wall time", value=seconds, unit="s")


def _line(case: str, metric: str, value: float, peer: str, peer_value: float) -> None:
    emit(case=case, metric=metric, value=value, unit="1", peer=peer, peer_value=peer_value)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    verbs = parser.add_subparsers(required=True)
    traces = verbs.add_parser("waste", help=waste_of_traces.__doc__)
    traces.add_argument("--traces", type=Path, required=True)
    traces.set_defaults(run=waste_of_traces)
    timed = verbs.add_parser("speed", help=speed.__doc__)
    timed.add_argument("--requests", type=int, default=1_000_000)
    timed.set_defaults(run=speed)
    limited = verbs.add_parser("grids", help=grids.__doc__)
    limited.add_argument("--traces", type=Path, required=True)
    limited.set_defaults(run=grids)
    verbs.add_parser("refusals", help=refusals.__doc__).set_defaults(run=refusals)
    verbs.add_parser("points", help=points.__doc__).set_defaults(run=points)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
