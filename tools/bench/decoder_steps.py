"""Case ``serve`` of step.py: whole decoder steps with adapters against the same steps without.

The programs are those of `aot_lora.decoder`, at points that `Point` names; weights are random.
Results are checked before they are timed: rows without an adapter say what the step without LoRA
says, and adapters change what the others say.
"""

from __future__ import annotations

import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lines import emit, note

# Name, ranks of the batch's adapters.
MIXES: dict[str, tuple[int, ...]] = {
    "1 adapter r=16": (16,),
    "8 adapters r=16": (16,) * 8,
    "8 adapters r=64": (64,) * 8,
    "8 adapters r=8..128": (8, 8, 16, 32, 64, 128, 128, 128),
}
_CONFIG = """\
model: {model}
target: {{platform: {platform}{topology}}}
lora: {{ranks: [8, 16, 64, 128], slots: [0, 1, 8], max_adapters: 8, quantum: 16, dtype: {dtype}}}
tokens: {{budget: {tokens}, buckets: [{tokens}]}}
kv_cache: {{sequences: {sequences}, length: {length}}}
programs: [lora, {{entry: "aot_lora.decoder:mixed_step"}}]
store: {{root: store}}
"""


def serve(
    *,
    model: str,
    platform: str,
    tokens: int,
    decode: bool,
    rounds: int,
    hardware: str,
    mixes: Sequence[str] | None,
) -> None:
    """Times the steps of one shape, with and without adapters, in turn."""
    chosen = {label: MIXES[label] for label in mixes or MIXES}
    import jax
    import numpy as np

    sequences, length = (tokens, 2048) if decode else (16, 2048)
    dtype = "bfloat16" if platform == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "step.yaml"
        path.write_text(
            _CONFIG.format(
                model=model,
                platform=platform,
                topology=f", topology: {hardware}" if hardware else "",
                dtype=dtype,
                tokens=tokens,
                sequences=sequences,
                length=length,
            ),
            encoding="utf-8",
        )
        from aot_lora import load_config

        config = load_config(path)
    case = f"step/{platform}/{model}/{'decode' if decode else 'prefill'}-{tokens}"
    plan = config.plan
    arguments = partial(_Arguments, plan, tokens, sequences, decode)
    weights = random_weights(plan, config.targets[0])
    banks = _random_banks(plan, config.targets[0])
    cache = None
    programs: dict[int, Any] = {}
    steps: dict[str, tuple[Callable[..., Any], Any]] = {}
    for label, ranks in {"no adapter": (), **chosen}.items():
        lanes = plan.lanes.bucket(sum(map(plan.adapter_lanes.bucket, ranks))) if ranks else 0
        began = time.perf_counter()
        if lanes not in programs:
            programs[lanes] = _compile(plan, config.targets[0], tokens, lanes, decode)
            note(f"{case}, {lanes} lanes: compiled in {time.perf_counter() - began:.1f} s")
        compiled = programs[lanes]
        made = arguments(ranks, lanes)
        if cache is None:
            cache = jax.tree.map(
                lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype)),
                compiled.args_info[0][1],
            )
        extra = (banks, made.batch) if lanes else ()
        steps[label] = compiled, (made.rows, made.sampling, *extra)
        if lanes:
            nobody = arguments((), lanes)
            steps[f"{label}, rows without"] = (
                compiled,
                (
                    nobody.rows,
                    nobody.sampling,
                    banks,
                    nobody.batch,
                ),
            )

    def run(label: str) -> np.ndarray:
        nonlocal cache
        step, rest = steps[label]
        tokens, cache = step(weights, cache, *rest)
        return np.asarray(tokens)

    base = run("no adapter")
    for label in steps:
        same = (run(label) == base).mean()
        # Another program rounds otherwise, and random logits have near ties.
        if label.endswith("rows without") and same < min(0.9, 1 - 2 / len(base)):
            raise SystemExit(f"{case}, {label}: only {same:.0%} of the tokens are the base's")
        if label in chosen and same > 0.9:
            raise SystemExit(f"{case}, {label}: the adapters change nothing")
    seconds: dict[str, list[float]] = {label: [] for label in ("no adapter", *chosen)}
    for _ in range(rounds):
        for label, times in seconds.items():
            times.append(_timed(partial(run, label)))
    peer = statistics.median(seconds["no adapter"])
    for label in chosen:
        value = statistics.median(seconds[label])
        emit(
            case=case,
            metric=f"a step, {label}",
            value=value * 1e3,
            unit="ms",
            peer="no adapter",
            peer_value=peer * 1e3,
        )


def _timed(run: Callable[[], Any], count: int = 5) -> float:
    """Seconds of one of `count` steps in a row; each waits for its tokens, as a server does."""
    began = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - began) / count


class _Arguments:
    """Rows, sampling and batch of a step in which each adapter has an equal share."""

    def __init__(
        self, plan: Any, tokens: int, sequences: int, decode: bool, ranks: Any, lanes: int
    ) -> None:
        import jax
        import numpy as np

        from aot_lora.kernels.blocks import NOBODY

        rows = np.arange(tokens, dtype=np.int32)
        if decode:
            owner, position = rows % sequences, np.full(tokens, 1024, np.int32)
            sample = np.arange(sequences, dtype=np.int32)
        else:  # eight prompts of whole chunks behind empty decode rows
            part = (tokens - sequences) // 8 // 128 * 128
            at = rows - sequences
            inside = (at >= 0) & (at < 8 * part)
            owner = np.where(inside, at // part, 0).astype(np.int32)
            position = np.where(inside, at % part, -1).astype(np.int32)
            last = sequences + (np.arange(sequences) + 1) * part - 1
            sample = np.where(np.arange(sequences) < 8, last, -1).astype(np.int32)
        self.rows = jax.device_put(
            {"tokens": rows * 7 % 251, "positions": position, "sequences": owner}
        )
        self.sampling = jax.device_put(
            {
                "rows": sample,
                "temperature": np.zeros(sequences, np.float32),
                "seeds": np.zeros(sequences, np.uint32),
            }
        )
        blocks: list[tuple[int, int]] = []
        free = 1
        for slot, rank in enumerate(ranks):
            count = plan.adapter_lanes.bucket(rank) // plan.quantum
            blocks += [(free + n, slot) for n in range(count)]
            free += count
        blocks += [(0, NOBODY)] * (lanes // plan.quantum - len(blocks))
        slots = owner % len(ranks) if ranks else np.full(tokens, -1)
        self.batch = None
        if lanes:
            block, owners = np.array(blocks, np.int32).T
            self.batch = jax.device_put(
                {"blocks": block.copy(), "owners": owners.copy(), "slots": slots.astype(np.int32)}
            )


def _compile(plan: Any, target: Any, tokens: int, lanes: int, decode: bool) -> Any:
    import jax

    from aot_lora.decoder import step_program
    from aot_lora.programs.spec import Context, Point

    decode_rows = tokens if decode else plan.cache.sequences
    point, context = Point(tokens=tokens, lanes=lanes), Context(plan=plan, target=target)
    program = step_program(point, context, decode_rows=decode_rows)
    jitted = jax.jit(program.fn, donate_argnums=program.donate)
    return jitted.lower(*program.args).compile()


def random_weights(plan: Any, target: Any) -> Any:
    """A decoder's weights, made on the device: on the host 8B of them take minutes."""
    import jax

    weights = _drawn(_arguments(plan, target)[0])
    embed = weights["embed"]  # rows of unit variance, so that tokens differ
    return weights | {"embed": jax.jit(lambda x: x * x.shape[-2] ** 0.5)(embed)}


def _random_banks(plan: Any, target: Any) -> Any:
    """Banks full of adapters; block 0 is zero."""
    import jax

    clear = jax.jit(lambda bank: bank.at[:, 0].set(0), donate_argnums=0)
    return jax.tree.map(clear, _drawn(_arguments(plan, target)[4]))


def _arguments(plan: Any, target: Any) -> tuple[Any, ...]:
    from aot_lora.decoder.programs import step_args
    from aot_lora.programs.spec import Context, Point

    point = Point(tokens=plan.tokens.buckets[-1], lanes=plan.lanes.buckets[-1])
    return step_args(point, Context(plan=plan, target=target))


def _drawn(tree: Any) -> Any:
    import jax
    import jax.numpy as jnp

    @partial(jax.jit, static_argnums=(1, 2))
    def normal(key: Any, shape: Any, dtype: Any) -> Any:
        return (jax.random.normal(key, shape, jnp.bfloat16) * shape[-2] ** -0.5).astype(dtype)

    def made(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path)
        if "norm" in name:
            return jnp.ones(leaf.shape, leaf.dtype)
        return normal(jax.random.key(zlib.crc32(name.encode())), leaf.shape, leaf.dtype)

    return jax.tree_util.tree_map_with_path(made, tree)
