"""A small host around the steps: continuous batching, for tests, measurements and examples."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from aot_lora.decoder.schedule import Request, Rows, next_rows
from aot_lora.decoder.sharding import specs
from aot_lora.decoder.weights import (
    Weights,
    cache_shape,
    decoder_of,
    host_dtype,
    layers_apart,
    take_apart,
)
from aot_lora.errors import ConfigError, OutOfPlanError
from aot_lora.kernels.blocks import NOBODY


class Session:
    """Answers prompts with a runtime's `mixed_step` and `decode_step`. Never compiles.

    Not for several threads: it has one cache, and each step takes it over.

    Args:
      runtime: an open `aot_lora.Runtime`, which is of a layer above this one. Kept as `runtime`.
      weights: a tree as `load_checkpoint` and `random_weights` make it.

    Raises:
      ProgramError: the plan has no decoder; ConfigError: no room for prompts beside decode rows.
    """

    def __init__(self, runtime: Any, weights: Weights) -> None:
        self.runtime = runtime
        self._plan = runtime.plan
        _, cache = decoder_of(runtime.plan)
        budget: int = runtime.plan.tokens.buckets[-1]
        if budget <= cache.sequences:
            raise ConfigError(
                "no step has room for a prompt",
                where="tokens.budget",
                expected=f"more than kv_cache.sequences, {cache.sequences}",
                found=str(budget),
                next_step="raise tokens.budget and warm up",
            )
        self._cache_shape = cache
        apart = layers_apart(runtime.target.platform)
        by = specs(runtime.plan, tp=runtime.plan.tp, apart=apart)
        weights = take_apart(weights) if apart else weights
        size = (
            cache_shape(runtime.plan)
            if apart
            else (runtime.plan.layers, *cache_shape(runtime.plan))
        )
        zeros = np.zeros(size, host_dtype(runtime.plan))
        at = runtime.places.at
        self._weights = jax.device_put(weights, jax.tree.map(at, by.weights))
        self._cache = jax.tree.map(lambda spec: jax.device_put(zeros, at(spec)), by.cache)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        slots: Sequence[int],
        count: int,
        *,
        temperatures: Sequence[float] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> list[list[int]]:
        """Continues each prompt by `count` tokens.

        Args:
          prompts: token ids, each at least one.
          slots: each prompt's adapter, -1 for none.
          count: tokens to add.
          temperatures: each prompt's, 0 (the most likely token) unless given.
          seeds: each prompt's, 0 unless given.

        Raises:
          OutOfPlanError: a prompt is empty or does not fit the cache, a token is outside the
            vocabulary, or a slot holds no adapter.
        """
        requests = [
            Request(prompt=prompt, slot=slot, temperature=temperature, seed=seed)
            for prompt, slot, temperature, seed in zip(
                prompts,
                slots,
                temperatures or [0.0] * len(prompts),
                seeds or [0] * len(prompts),
                strict=True,
            )
        ]
        for index, request in enumerate(requests):
            self._check(index, request, count)
        queue = deque(requests if count > 0 else ())
        active: list[Request] = []
        while queue or active:
            self._admit(queue, active)
            self._step(active)
            active = [request for request in active if len(request.answer) < count]
        return [request.answer for request in requests]

    def _check(self, index: int, request: Request, count: int) -> None:
        shape, cache = decoder_of(self._plan)
        tokens = request.prompt
        if not tokens or len(tokens) + count > cache.length:
            raise OutOfPlanError(
                f"prompt {index} does not fit the cache",
                expected=f"1 to {cache.length - count} tokens: kv_cache.length is {cache.length}",
                found=f"{len(tokens)} tokens and {count} to add",
            )
        if not 0 <= min(tokens) <= max(tokens) < shape.vocab:
            raise OutOfPlanError(
                f"prompt {index} has tokens outside the vocabulary",
                expected=f"0 to {shape.vocab - 1}",
                found=f"{min(tokens)} to {max(tokens)}",
            )
        if request.slot != -1 and request.slot not in self.runtime.banks.owned:
            raise OutOfPlanError(
                f"slot {request.slot} of prompt {index} holds no adapter",
                expected=f"-1, or one of {sorted(self.runtime.banks.owned)}",
            )

    def _admit(self, queue: deque[Request], active: list[Request]) -> None:
        """Moves requests into free sequences, first come first served, while their lanes fit."""
        used = {request.sequence for request in active}
        free = [n for n in range(self._cache_shape.sequences) if n not in used]
        most = self._plan.lanes.buckets[-1]
        while queue and free:
            slots = {request.slot for request in (*active, queue[0])}
            if active and len(self._blocks(slots)) * self._plan.quantum > most:
                return
            request = queue.popleft()
            request.sequence = free.pop(0)
            active.append(request)

    def _blocks(self, slots: set[int]) -> list[tuple[int, int]]:
        """(block, owner) of each block of the adapters in `slots`."""
        owned = self.runtime.banks.owned
        return [(block, slot) for slot in sorted(slots - {-1}) for block in owned[slot]]

    def _step(self, active: list[Request]) -> None:
        budget = self._plan.tokens.buckets[-1]
        rows = next_rows(active, sequences=self._cache_shape.sequences, budget=budget)
        tokens = self._run(rows, active)
        for request in active:
            if rows.sample[request.sequence] >= 0:
                request.answer.append(int(tokens[request.sequence]))

    def _run(self, rows: Rows, active: list[Request]) -> np.ndarray:
        """Pads in numpy, puts, runs one step: the tokens of each sequence."""
        runtime, sequences = self.runtime, self._cache_shape.sequences
        temperature = np.zeros(sequences, np.float32)
        seeds = np.zeros(sequences, np.uint32)
        for request in active:
            temperature[request.sequence] = request.temperature
            seeds[request.sequence] = request.seed
        sampling = {"rows": rows.sample, "temperature": temperature, "seeds": seeds}
        with runtime.banks.reading() as banks:
            blocks = self._blocks({int(slot) for slot in rows.slots})
            found = runtime.lookup(
                "mixed_step" if rows.prefill else "decode_step",
                tokens=len(rows.tokens),
                lanes=len(blocks) * self._plan.quantum,
            )
            size = found.tokens
            put: list[Any] = [
                {
                    "tokens": _padded(rows.tokens, size, 0),
                    "positions": _padded(rows.positions, size, -1),
                    "sequences": _padded(rows.sequences, size, 0),
                },
                sampling,
            ]
            if found.lanes:
                count = found.lanes // self._plan.quantum
                block, owner = np.array(blocks, np.int32).T
                put.append(
                    {
                        "blocks": _padded(block, count, 0),
                        "owners": _padded(owner, count, NOBODY),
                        "slots": _padded(rows.slots, size, -1),
                    }
                )
            put = jax.device_put(put, runtime.device)
            extra = (banks, put[2]) if found.lanes else ()
            tokens, self._cache = found.executable(
                self._weights, self._cache, put[0], put[1], *extra
            )
        return np.asarray(tokens)


def _padded(rows: np.ndarray, size: int, filling: int) -> np.ndarray:
    padded = np.full(size, filling, np.int32)
    padded[: len(rows)] = rows
    return padded
