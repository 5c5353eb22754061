"""Tokens and adapters of each step that a server of continuous batching makes of a trace. Pure.

The policy is the one vLLM documents for its V1 scheduler with chunked prefill, first come first
served: every running request comes first, so that each decode gets its one token and a prompt that
was begun goes on; then waiting requests are admitted in order of arrival, as long as the step has
tokens and the server has sequences left. A prompt that does not fit is cut.
https://docs.vllm.ai/en/latest/configuration/optimization.html (chunked prefill)
Left out: preemption for want of cache, prefix caching and speculative tokens.
"""

from __future__ import annotations

import heapq
import math
from array import array
from dataclasses import dataclass

import numpy as np

from aot_lora.errors import PlanError
from aot_lora.plan.fit import Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Requests in order of arrival.

    Args:
      prompts: [n] tokens of each prompt, at least 1.
      outputs: [n] tokens generated for it.
      seconds: [n] when it arrived; never falls.
      adapters: [n] number of its adapter from 0, or -1 for none; None where nothing says.
    """

    prompts: Ints
    outputs: Ints
    seconds: np.ndarray[tuple[int], np.dtype[np.float64]]
    adapters: Ints | None = None

    def __len__(self) -> int:
        return len(self.prompts)

    def part(self, start: int, stop: int) -> Traffic:
        """The requests from `start` to `stop`."""
        cut = slice(start, stop)
        return Traffic(
            prompts=self.prompts[cut],
            outputs=self.outputs[cut],
            seconds=self.seconds[cut],
            adapters=None if self.adapters is None else self.adapters[cut],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The server that is simulated.

    Args:
      budget: most tokens of a step.
      sequences: most requests that run at once.
      step_seconds: what a step takes whatever it holds; token_seconds: and for each token. The
        defaults are near an 8B model in bfloat16 on an H200: 16 GB of weights at 4.8 TB/s and as
        much again for the cache and the launch; 16 GFLOP at half of 989 TFLOP/s.
      prefill_chunk: most tokens of prompts in a step; None for as many as the budget leaves.
    """

    budget: int
    sequences: int = 256
    step_seconds: float = 0.006
    token_seconds: float = 33e-6
    prefill_chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Runs of equal steps, in order.

    Args:
      tokens: [m] tokens of each step of a run; repeats: [m] steps of the run.
      slots: [m] adapters active in it; None where the trace has none.
      late_seconds: how long after the last arrival the last step ended.
    """

    tokens: Ints
    repeats: Ints
    slots: Ints | None
    late_seconds: float

    def halves(self, *, later: bool) -> tuple[Steps, Steps]:
        """As `cut_in_halves` says."""
        first, second = (
            Steps(
                tokens=self.tokens[cut],
                repeats=self.repeats[cut],
                slots=None if self.slots is None else self.slots[cut],
                late_seconds=self.late_seconds,
            )
            for cut in cut_in_halves(self.repeats, later=later)
        )
        return first, second

    @property
    def count(self) -> int:
        """How many steps."""
        return int(self.repeats.sum())


def cut_in_halves(repeats: Ints, *, later: bool) -> tuple[slice, slice]:
    """Two halves of at least two runs: earlier and later if `later`, else every second in turn."""
    if not later:
        return slice(0, None, 2), slice(1, None, 2)
    passed = np.cumsum(repeats)
    middle = int(np.searchsorted(passed, (passed[-1] + 1) // 2)) + 1
    middle = min(middle, len(repeats) - 1)
    return slice(None, middle), slice(middle, None)


def simulate(traffic: Traffic, server: Server) -> Steps:
    """The steps of one server under a trace.

    Runs of decodes between two events (an arrival, an end) are one entry, so the work grows with
    the requests and not with the tokens that they generate.

    Raises:
      PlanError: no room for one token of each running sequence.
    """
    if not 1 <= server.sequences <= server.budget:
        raise PlanError(
            f"a budget of {server.budget} tokens for {server.sequences} sequences",
            expected="at least one sequence, and a token of each in every step",
            next_step=f"allow at most {server.budget} sequences, "
            f"or a budget of at least {max(server.sequences, 1)}",
        )
    # Plain numbers: numpy's scalars are slow one at a time.
    prompts: list[int] = traffic.prompts.tolist()
    outputs: list[int] = traffic.outputs.tolist()
    arrivals: list[float] = traffic.seconds.tolist()
    adapters: list[int] | None = None if traffic.adapters is None else traffic.adapters.tolist()
    running: list[tuple[int, int]] = []  # (first step without it, its adapter), decoding
    active: dict[int, int] = {}  # requests of each adapter
    tokens_of, repeats_of, slots_of = array("q"), array("q"), array("q")
    total, following = len(prompts), 0
    step, now = 0, 0.0
    begun, left_of_begun = -1, 0  # the one prompt that was cut
    while True:
        while running and running[0][0] <= step:
            adapter = heapq.heappop(running)[1]
            if adapter >= 0:
                active[adapter] -= 1
                if not active[adapter]:
                    del active[adapter]
        decoding = len(running)
        if not decoding and begun < 0:
            if following == total:
                break
            now = max(now, arrivals[following])
        room = before = min(server.budget - decoding, server.prefill_chunk or server.budget)
        held = decoding + (begun >= 0)
        while room > 0:
            if begun < 0:
                if following == total or held == server.sequences or arrivals[following] > now:
                    break
                begun, left_of_begun = following, prompts[following]
                following += 1
                held += 1
                if adapters is not None and adapters[begun] >= 0:
                    active[adapters[begun]] = active.get(adapters[begun], 0) + 1
            chunk = min(left_of_begun, room)
            room -= chunk
            left_of_begun -= chunk
            if not left_of_begun:
                adapter = -1 if adapters is None else adapters[begun]
                # The step that ends a prompt samples the first token of its output.
                heapq.heappush(running, (step + max(outputs[begun], 1), adapter))
                begun = -1
        tokens = decoding + before - room
        seconds = server.step_seconds + tokens * server.token_seconds
        repeats = 1
        if tokens == decoding and begun < 0:
            repeats = running[0][0] - step
            if following < total and held < server.sequences:
                until = math.ceil((arrivals[following] - now) / seconds)
                repeats = min(repeats, max(until, 1))
        tokens_of.append(tokens)
        repeats_of.append(repeats)
        if adapters is not None:
            slots_of.append(len(active))
        step += repeats
        now += repeats * seconds
    return Steps(
        tokens=np.asarray(tokens_of, np.int64),
        repeats=np.asarray(repeats_of, np.int64),
        slots=None if adapters is None else np.asarray(slots_of, np.int64),
        late_seconds=max(0.0, now - arrivals[-1]) if total else 0.0,
    )
