"""The simulated server, step by step against hand-computed schedules."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aot_lora.errors import PlanError
from aot_lora.plan.simulate import Server, Steps, Traffic, simulate

SECOND = Server(budget=8, sequences=4, step_seconds=1.0, token_seconds=0.0)


def traffic(*requests: tuple[int, int, float], adapters: list[int] | None = None) -> Traffic:
    prompts, outputs, seconds = zip(*requests, strict=True)
    return Traffic(
        prompts=np.array(prompts),
        outputs=np.array(outputs),
        seconds=np.array(seconds, float),
        adapters=None if adapters is None else np.array(adapters),
    )


def each(steps: Steps, name: str = "tokens") -> list[int]:
    return np.repeat(getattr(steps, name), steps.repeats).tolist()


def server(**changed: Any) -> Server:
    fields = {name: getattr(SECOND, name) for name in Server.__dataclass_fields__}
    return Server(**{**fields, **changed})


def test_a_request_is_its_prompt_and_then_a_token_a_step() -> None:
    # The step of the prompt samples the first of the three.
    assert each(simulate(traffic((5, 3, 0)), SECOND)) == [5, 1, 1]


def test_a_long_prompt_is_cut_at_the_budget() -> None:
    assert each(simulate(traffic((19, 2, 0)), SECOND)) == [8, 8, 3, 1]


def test_decodes_come_first_and_prompts_share_what_is_left_in_order() -> None:
    # 0: a 4 of 4, b 4 of 9. 1: a decodes, b 5, c 2 of 3. 2: a ends; b, c's last 1. 3: b. 4: b.
    found = simulate(traffic((4, 3, 0), (9, 4, 0), (3, 1, 0)), SECOND)

    assert each(found) == [8, 8, 3, 1, 1]


def test_a_prefill_chunk_is_the_most_prompt_tokens_of_a_step() -> None:
    # a 4, then b 3 of 9 beside a, b 4, b's last 2 and both of c; decodes are not counted.
    found = simulate(traffic((4, 4, 0), (9, 1, 0.5), (2, 1, 0.5)), server(prefill_chunk=4))

    assert each(found) == [4, 5, 5, 4]
    assert each(simulate(traffic((9, 2, 0)), server(prefill_chunk=4))) == [4, 4, 1, 1]


def test_no_more_sequences_run_than_allowed() -> None:
    found = simulate(traffic((1, 2, 0), (1, 2, 0), (1, 2, 0)), server(sequences=2))

    assert each(found) == [2, 2, 1, 1]


def test_a_request_waits_for_its_time_and_the_server_for_a_request() -> None:
    # It comes at 2.5 while the first decodes: admitted at 3. The last comes long after.
    found = simulate(traffic((2, 5, 0), (3, 1, 2.5), (7, 1, 100)), SECOND)

    assert each(found) == [2, 1, 1, 4, 1, 7]
    assert found.late_seconds == 1.0


def test_adapters_count_once_while_a_request_of_theirs_runs() -> None:
    found = simulate(
        traffic((2, 3, 0), (2, 1, 0), (2, 2, 0), (2, 4, 0), adapters=[0, 0, 1, -1]), SECOND
    )

    assert each(found) == [8, 3, 2, 1]
    assert each(found, "slots") == [2, 2, 1, 0]


def test_a_prompt_without_output_still_takes_its_step() -> None:
    assert each(simulate(traffic((3, 0, 0)), SECOND)) == [3]


REQUESTS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(0, 9)), min_size=1, max_size=12
)


@given(requests=REQUESTS, budget=st.integers(1, 20), sequences=st.integers(1, 5))
def test_every_token_is_computed_once_and_no_step_is_above_the_budget(
    requests: list[tuple[int, int, int]], budget: int, sequences: int
) -> None:
    asked = sorted(requests, key=lambda request: request[2])
    sequences = min(sequences, budget)
    found = simulate(traffic(*asked), server(budget=budget, sequences=sequences))

    assert sum(each(found)) == sum(prompt + output - 1 for prompt, output, _ in asked)
    assert 1 <= min(each(found)) <= max(each(found)) <= budget


@given(
    requests=REQUESTS,
    budget=st.integers(3, 20),
    seconds=st.sampled_from([1.0, 0.25, 2.5]),
    chunk=st.sampled_from([None, 1, 4, 7, 30]),
)
def test_runs_of_steps_are_those_of_a_server_that_takes_one_at_a_time(
    requests: list[tuple[int, int, int]], budget: int, seconds: float, chunk: int | None
) -> None:
    asked = sorted(requests, key=lambda request: request[2])
    one = server(budget=budget, sequences=3, step_seconds=seconds, prefill_chunk=chunk)

    assert each(simulate(traffic(*asked), one)) == slow(asked, budget, 3, seconds, chunk)


def slow(
    asked: list[Any], budget: int, sequences: int, seconds: float, chunk: int | None
) -> list[int]:
    """vLLM's loop as written there: `running` in order, then `waiting`, one step at a time."""
    waiting = [[prompt, output, arrival] for prompt, output, arrival in asked]
    running: list[list[Any]] = []
    now, steps = 0.0, []
    while waiting or running:
        if not running:
            now = max(now, waiting[0][2])
        left, done = budget, []
        prompts = budget if chunk is None else chunk  # tokens of prompts that are left
        for request in running:
            tokens = min(request[0] or 1, left, prompts if request[0] else 1)
            left -= tokens
            prompts -= tokens if request[0] else 0
            done.append((request, tokens))
        while waiting and waiting[0][2] <= now and left and prompts and len(running) < sequences:
            request = waiting.pop(0)
            running.append(request)
            tokens = min(request[0], left, prompts)
            left -= tokens
            prompts -= tokens
            done.append((request, tokens))
        for request, tokens in done:
            if request[0]:
                request[0] -= tokens
            if not request[0] and tokens:
                request[1] -= 1
        running = [request for request in running if request[1] > 0]
        steps.append(budget - left)
        now += seconds
    return steps


@pytest.mark.parametrize(("budget", "sequences"), [(8, 9), (8, 0), (0, 1)])
def test_a_budget_without_a_token_for_each_sequence_is_refused(budget: int, sequences: int) -> None:
    with pytest.raises(PlanError) as caught:
        simulate(traffic((1, 1, 0)), server(budget=budget, sequences=sequences))

    assert str(caught.value) == (
        f"a budget of {budget} tokens for {sequences} sequences\n"
        "  expected: at least one sequence, and a token of each in every step\n"
        f"  next: allow at most {budget} sequences, or a budget of at least {max(sequences, 1)}"
    )
